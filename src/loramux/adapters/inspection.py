"""The work of ``loramux inspect``: a verdict on an adapter, and what it is made of.

The verdict is that of the reader which serves adapters. Without a base, it is given a layout made
of the adapter's own tensors, so that all is judged which does not hang on the base. Torch is loaded
only when there are weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.adapters.experts import expert_modules
from loramux.adapters.formats.meaning import Meaning
from loramux.adapters.formats.module_names import never_served
from loramux.adapters.formats.overview import Overview, read_overview
from loramux.adapters.formats.peft_config import CONFIG_FILE, PeftConfig
from loramux.adapters.formats.peft_keys import DeltaKey, ParameterKey, Part, parse_key
from loramux.adapters.formats.peft_patterns import BadPattern
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.inspected import (
    Inspection,
    LayerFacts,
    ModuleFacts,
    ReferenceBase,
    Stated,
    TierBytes,
    place,
)
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleShape, Replacement
from loramux.adapters.told_experts import holder, told_experts
from loramux.adapters.trtllm_names import trtllm_name
from loramux.adapters.unusual import remarks
from loramux.errors import AdapterRefused

if TYPE_CHECKING:
    from loramux.adapters.loaded import LoadedAdapter

MOST_OF_ENERGY = 0.9

_NO_BASE = "its base"
_VOCABULARY = 2**31
"""More tokens than any base has, where there is none to tell."""

PackedBytes = Callable[[LoraSpec, BaseLayout, str], int]
"""Spec, the base, dtype -> bytes of the adapter's block."""


def inspect_adapter(
    directory: Path,
    base: ReferenceBase | None = None,
    *,
    max_rank: int,
    packed_bytes: PackedBytes,
    lenient: bool = False,
    measure: bool = True,
) -> Inspection:
    """Judge an adapter directory as a server of ``base`` would, and describe it.

    ``lenient``: as the server's option. ``measure``: also the norms and singular values of the
    deltas, unless the adapter is refused.
    """
    report = Report(lenient=lenient)
    told = read_overview(directory, report)
    stated = Stated.of(directory)
    if told.rank is not None and told.rank > max_rank:
        report.warn(f"rank {told.rank} is above the limit of {max_rank}")
    found = _told_by_config(directory, stated, told, report)
    dtype = found.bytes.block_dtype if base is None else base.dtype
    if _has_weights(directory):
        layout = _own_layout(stated, told) if base is None else base.layout
        loaded = _read(directory, layout, max_rank=max_rank, lenient=lenient)
        found = replace(found, checked_against=None if base is None else layout.name)
        if isinstance(loaded, AdapterRefused):
            modules = tuple(_told_by_header(told))
            tiers = TierBytes(told.num_bytes, None, dtype)
            found = replace(found, verdict="refused", reasons=loaded.reasons)
        else:
            modules = tuple(_told_by_spec(loaded.spec, use_rslora=bool(found.use_rslora)))
            modules = tuple(_measured(modules, loaded, base)) if measure else modules
            block = packed_bytes(loaded.spec, layout, dtype)
            tiers = TierBytes(told.num_bytes, block, dtype)
            found = replace(
                found,
                verdict="serveable",
                unusual=loaded.spec.warnings,
                replaced=tuple(map(_replaced, loaded.spec.replacements)),
                vocab_size=loaded.spec.vocab_size,
            )
        found = replace(found, modules=modules, layers=tuple(_layers(modules)), bytes=tiers)
    peft = told.meaning if isinstance(told.meaning, PeftConfig) else None
    more = remarks(stated, peft, found.modules, base)
    return replace(found, unusual=(*found.unusual, *more))


def _told_by_config(directory: Path, stated: Stated, told: Overview, report: Report) -> Inspection:
    """All that is known before the weights are looked at."""
    if told.format == "peft":
        base_model = stated.text("base_model_name_or_path")
    else:
        base_model = None if told.meaning is None else told.meaning.base_model
    return Inspection(
        verdict="refused" if report.refused else "config only",
        reasons=report.reasons,
        checked_against=None,
        unusual=report.warnings,
        adapter=str(directory),
        format=told.format,
        peft_version=stated.text("peft_version"),
        base_model=base_model,
        revision=stated.text("revision"),
        rank=told.rank,
        alpha=told.alpha,
        use_rslora=told.use_rslora,
        use_dora=told.use_dora,
        bytes=TierBytes(None, None, "bfloat16"),
    )


def _has_weights(directory: Path) -> bool:
    """Whether there is a file beside the configuration that some tool takes for the weights."""
    kinds = ("adapter*", "*.nemo", "model_weights.ckpt")
    return directory.is_file() or any(
        path.name != CONFIG_FILE for kind in kinds for path in directory.glob(kind)
    )


def _read(
    directory: Path, layout: BaseLayout, *, max_rank: int, lenient: bool
) -> LoadedAdapter | AdapterRefused:
    from loramux.adapters.formats.reader import read_adapter  # loads torch

    try:
        return read_adapter(directory.name, directory, layout, max_rank=max_rank, lenient=lenient)
    except AdapterRefused as refusal:
        return refusal


def _shapes(entries: Mapping[str, TensorEntry]) -> Mapping[str, Mapping[Part, tuple[int, ...]]]:
    """Shapes of A, B and the magnitude by the adapter's own name of the module."""
    found: dict[str, dict[Part, tuple[int, ...]]] = defaultdict(dict)
    for key, entry in entries.items():
        parsed = parse_key(key)
        if isinstance(parsed, DeltaKey):
            found[parsed.path][parsed.part] = entry.shape
    return found


def _own_layout(stated: Stated, told: Overview) -> BaseLayout:
    """The base that the tensors tell of: what they agree on among themselves is right."""
    entries, shapes = told.entries, _shapes(told.entries)
    parameters = () if told.meaning is None else told.meaning.beside.parameters
    experts = told_experts(shapes, told.rank, parameters)
    modules = {
        path: ModuleShape(
            next(reversed(parts.get("lora_A", ())), 0), next(iter(parts.get("lora_B", ())), 0)
        )
        for path, parts in shapes.items()
        if never_served(path) is None and holder(path)[0] not in experts
    }
    modules |= expert_modules(experts)
    replaceable: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    embedding = None
    for key, entry in entries.items():
        parsed = parse_key(key)
        if isinstance(parsed, DeltaKey) and parsed.of_embedding:
            embedding = parsed.path
        elif isinstance(parsed, ParameterKey):
            if parsed.origin != "tokens":
                replaceable[parsed.path][parsed.parameter] = entry.shape
            else:  # which may stand beside the whole
                some = (_VOCABULARY, *entry.shape[1:])
                replaceable[parsed.path].setdefault(parsed.parameter, some)
    ends = {path.rpartition(".")[2]: path for path in (*replaceable, *modules)}
    return BaseLayout(
        # With the name that the adapter gives, so that no other name is remarked upon.
        stated.text("base_model_name_or_path") or _NO_BASE,
        modules,
        replaceable=replaceable,
        embedding=embedding or ends.get("embed_tokens") or ends.get("wte"),
        head=ends.get("lm_head"),
        experts=experts,
    )


def _told_by_header(told: Overview) -> Iterator[ModuleFacts]:
    """What names and shapes say where the adapter as a whole says nothing that can be trusted."""
    for path, parts in _shapes(told.entries).items():
        rank, scale = _rank_and_scale(told.meaning, path)
        alpha = None
        if rank is not None and scale is not None:
            alpha = _alpha(rank, scale, use_rslora=bool(told.use_rslora))
        rank = next(iter(parts.get("lora_A", ())), rank)
        kind, layer = place(path)
        yield ModuleFacts(
            module=path,
            kind=kind,
            layer=layer,
            trtllm_name=trtllm_name(path),
            rank=rank,
            alpha=alpha,
            scale=scale,
        )


def _rank_and_scale(config: Meaning | None, path: str) -> tuple[int | None, float | None]:
    try:
        return (None, None) if config is None else config.rank_and_scale(path)
    except BadPattern:  # which is a reason for the refusal
        return None, None


def _alpha(rank: int, scale: float, *, use_rslora: bool) -> float:
    """The alpha that gives this scale, without the last digits that a division has made."""
    return float(f"{scale * (math.sqrt(rank) if use_rslora else rank):.12g}")


def _told_by_spec(spec: LoraSpec, *, use_rslora: bool) -> Iterator[ModuleFacts]:
    for delta in spec.deltas:
        kind, layer = place(delta.module)
        yield ModuleFacts(
            module=delta.module,
            kind=kind,
            layer=layer,
            trtllm_name=trtllm_name(delta.module),
            rows=None if delta.rows is None else (delta.rows.start, delta.rows.stop),
            rank=delta.rank,
            alpha=_alpha(delta.rank, delta.scale, use_rslora=use_rslora),
            scale=delta.scale,
        )


def _measured(
    modules: Iterable[ModuleFacts], loaded: LoadedAdapter, base: ReferenceBase | None
) -> Iterator[ModuleFacts]:
    """The same with all that comes out of the weights."""
    import torch

    from loramux.adapters.spectrum import singular_values

    for facts, delta in zip(modules, loaded.spec.deltas, strict=True):
        b = torch.cat(delta.pick(loaded.tensors[delta.b]))
        values = singular_values(loaded.tensors[delta.a], b, delta.scale)
        norm = math.hypot(*values)
        base_norm = None if base is None else base.weight_norm(delta.module)
        yield replace(
            facts,
            delta_norm=norm,
            base_norm=base_norm,
            relative_norm=norm / base_norm if base_norm else None,
            top_share=(values[0] / norm) ** 2 if norm else None,
            values_for_90=_values_for(MOST_OF_ENERGY, values, norm) if norm else None,
            singular_values=values,
        )


def _values_for(share: float, values: Sequence[float], norm: float) -> int:
    energy = 0.0
    for count, value in enumerate(values, start=1):
        energy += (value / norm) ** 2
        if energy >= share:
            return count
    return len(values)


def _replaced(replacement: Replacement) -> str:
    parameter = f"{replacement.module}.{replacement.parameter}"
    return parameter if replacement.rows is None else f"{parameter} ({len(replacement.rows)} rows)"


def _layers(modules: Sequence[ModuleFacts]) -> Iterator[LayerFacts]:
    by_layer: dict[int, list[ModuleFacts]] = defaultdict(list)
    for facts in modules:
        if facts.layer is not None and facts.delta_norm is not None:
            by_layer[facts.layer].append(facts)
    for layer, members in sorted(by_layer.items()):
        norm = math.hypot(*(facts.delta_norm or 0.0 for facts in members))
        base_norms = {facts.module: facts.base_norm for facts in members}
        known = [base_norm for base_norm in base_norms.values() if base_norm]
        relative = norm / math.hypot(*known) if len(known) == len(base_norms) else None
        yield LayerFacts(layer, norm, relative)
