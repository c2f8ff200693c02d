"""An inspection as text: the verdict first, then facts, a row for each kind of module, remarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table

from loramux.adapters.experts import inside
from loramux.adapters.inspected import Inspection, LayerFacts, ModuleFacts, place
from loramux.adapters.report import printable
from loramux.cli.plain_text import columns, harmless

_BAR_CELLS = 40
_UNITS = ("bytes", "KiB", "MiB", "GiB")


def lines(found: Inspection) -> Iterator[str]:
    """Everything but the singular values, for any output."""
    yield _verdict(found)
    for reason in found.reasons:
        yield f"  - {harmless(reason)}"
    yield ""
    for name, value in _facts(found):
        yield f"{name:12}{value}"
    if found.modules:
        yield ""
        yield from _table(found.modules)
    if found.replaced:
        yield ""
        yield "own values in place of the base's"
        yield from _replaced(found.replaced)
    if found.unusual:
        yield ""
        yield "unusual"
        for remark in found.unusual:
            yield f"  - {harmless(remark)}"


def plot(layers: Sequence[LayerFacts]) -> RenderableType:
    """A bar for each layer: the norm of its deltas, relative to the base where that is known."""
    relative = all(layer.relative_norm is not None for layer in layers)
    values = [(layer.relative_norm if relative else layer.delta_norm) or 0.0 for layer in layers]
    table = Table.grid(padding=(0, 1))
    for layer, value in zip(layers, values, strict=True):
        bar = Bar(max(values) or 1.0, 0, value, width=_BAR_CELLS)
        table.add_row(str(layer.layer), bar, f"{value:.3g}")
    title = f"norm of the delta by layer{', relative to the base' if relative else ''}"
    return Group("", title, table)


def _verdict(found: Inspection) -> str:
    if found.verdict == "config only":
        return "config only: nothing in it is refused, there are no weights beside it"
    if found.checked_against is None:
        return f"{found.verdict} (not checked against a base)"
    return f"{found.verdict} on {printable(found.checked_against)}"


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "adapter", printable(found.adapter, 400)
    version = f" {printable(found.peft_version, 40)}" if found.peft_version else ""
    yield "format", found.format + version
    trained_on = printable(found.base_model) if found.base_model else "not said"
    revision = f", revision {printable(found.revision)}" if found.revision else ""
    yield "made for", trained_on + revision
    if found.rank is not None and found.alpha is not None:
        kinds = [
            word for word, used in (("rsLoRA", found.use_rslora), ("DoRA", found.use_dora)) if used
        ]
        yield "config", ", ".join([f"rank {found.rank}", f"alpha {found.alpha:g}", *kinds])
    if found.vocab_size is not None:
        yield "vocabulary", f"{found.vocab_size} tokens, more than the base's"
    if found.bytes.file is not None:
        yield "file", _size(found.bytes.file)
    if found.bytes.block is not None:
        size = f"{_size(found.bytes.block)} in {found.bytes.block_dtype}"
        yield "block", f"{size}: on the host, and on the device while it has a slot"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _replaced(parameters: Sequence[str]) -> Iterator[str]:
    """A line for each kind of parameter, with the layers that have it."""
    layers: dict[str, list[int]] = {}
    for parameter in parameters:
        kind, layer = place(parameter)
        layers.setdefault(kind, []).extend(() if layer is None else (layer,))
    for kind, numbers in layers.items():
        yield f"  - {printable(kind)}" + (f", layers {_runs(numbers)}" if numbers else "")


def _table(modules: Sequence[ModuleFacts]) -> Iterator[str]:
    """A row for each kind of module, all experts in one; numbers that differ between layers and
    experts are ``least..largest``."""
    kinds: dict[tuple[str, str], list[ModuleFacts]] = {}
    for facts in modules:
        place = inside(facts.kind)
        kind = (facts.kind, "") if place is None else (place.experts, place.leaf)
        kinds.setdefault(kind, []).append(facts)
    relative = any(facts.relative_norm is not None for facts in modules)
    head = ["module", "layers", "rank", "alpha", "scale"]
    measured = any(facts.delta_norm is not None for facts in modules)
    if measured:
        head += ["delta/base" if relative else "delta", "in top value", "values for 90%"]
    rows = [head]
    for kind, members in kinds.items():
        row = [
            _kind(*kind, members),
            _runs([m.layer for m in members if m.layer is not None]),
            _span(m.rank for m in members),
            _span(m.alpha for m in members),
            _span(m.scale for m in members),
        ]
        if measured:
            row += [
                _span(m.relative_norm if relative else m.delta_norm for m in members),
                _span((m.top_share for m in members), percent=True),
                _span(m.values_for_90 for m in members),
            ]
        rows.append(row)
    yield from columns(rows)


def _kind(name: str, leaf: str, members: Sequence[ModuleFacts]) -> str:
    """``mlp.experts.0-127.up_proj``, where ``leaf`` is in experts."""
    if not leaf:
        return printable(name)
    places = (inside(facts.kind) for facts in members)
    numbers = _runs([place.expert for place in places if place is not None])
    return f"{printable(name)}.{numbers}.{printable(leaf)}"


def _runs(numbers: Sequence[int]) -> str:
    """``0, 1, 2, 5`` is ``0-2,5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ",".join(texts) or "-"


def _span(values: Iterable[float | None], *, percent: bool = False) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    texts = [_number(value, percent=percent) for value in (min(known), max(known))]
    return texts[0] if texts[0] == texts[1] else "..".join(texts)


def _number(value: float, *, percent: bool) -> str:
    return f"{value:.0%}" if percent else f"{value:.3g}"
