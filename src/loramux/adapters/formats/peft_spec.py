"""From configuration, weight header and base layout to a LoraSpec. No tensor is read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.adapters.formats.module_names import ModuleNames
from loramux.adapters.formats.peft_config import PeftConfig
from loramux.adapters.formats.peft_keys import DeltaKey, Part, describe_other, parse_key
from loramux.adapters.formats.peft_patterns import BadPattern
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.report import Report, printable
from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleDelta, ModuleShape

SERVED_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

Entries = Mapping[str, TensorEntry]


@dataclass
class _Group:
    """The tensors of one module of the adapter, by part."""

    path: str
    keys: dict[Part, str] = field(default_factory=dict)


def build_spec(
    config: PeftConfig, entries: Entries, base: BaseLayout, *, max_rank: int, report: Report
) -> LoraSpec | None:
    """The deltas of an adapter in the order of the base's modules.

    Every tensor ends in exactly one delta or in a refusal; None when there is any.
    """
    _check_dtypes(entries, report)
    groups = _group(entries, report)
    placed = _place(groups, base, report)
    deltas = []
    for module, group in placed.items():
        try:
            delta = _delta(module, group, config, entries, base.modules[module], report)
        except BadPattern as problem:
            report.refuse(f"rank_pattern or alpha_pattern {problem}")
            return None
        if delta is not None:
            deltas.append(delta)
    _check_max_rank(deltas, max_rank, report)
    _warn_about_targets(config, groups, report)
    _warn_about_base(config, base, report)
    if report.refused:
        return None
    order = {name: i for i, name in enumerate(base.modules)}
    deltas.sort(key=lambda delta: order[delta.module])
    return LoraSpec(tuple(deltas), report.warnings)


def _check_dtypes(entries: Entries, report: Report) -> None:
    for key, entry in entries.items():
        if entry.dtype not in SERVED_DTYPES:
            report.refuse(f"dtype {entry.dtype} is not served: store weights as F16 or F32", key)


def _group(entries: Entries, report: Report) -> dict[str, _Group]:
    """Tensors by the adapter's own name of their module."""
    groups: dict[str, _Group] = {}
    adapters: set[str | None] = set()
    for key in entries:
        parsed = parse_key(key)
        if parsed is None:
            report.refuse(describe_other(key), key)
            continue
        adapters.add(parsed.adapter)
        _add(groups.setdefault(parsed.path, _Group(parsed.path)), parsed, key, report)
    named = sorted(name for name in adapters if name is not None)
    if len(named) > 1:
        report.refuse("the file holds more than one adapter", ", ".join(named))
    if not entries:
        report.refuse("the weight file holds no tensors")
    return groups


def _add(group: _Group, parsed: DeltaKey, key: str, report: Report) -> None:
    if parsed.part in group.keys:
        report.refuse("duplicate: two tensors are meant for the same place", key)
    group.keys[parsed.part] = key


def _place(groups: Mapping[str, _Group], base: BaseLayout, report: Report) -> dict[str, _Group]:
    """Groups by the module of the base that each of them changes."""
    names = ModuleNames(base)
    placed: dict[str, _Group] = {}
    for path, group in groups.items():
        module = names.find(path)
        if module is None:
            report.refuse(names.why_not(path), path)
        elif module in placed:
            report.refuse("duplicate: two names are meant for the same module", path)
        else:
            placed[module] = group
    if groups and not placed:
        report.refuse(
            f"not one module of the adapter matches {base.name}: it was made for another model"
        )
    return placed


def _delta(
    module: str,
    group: _Group,
    config: PeftConfig,
    entries: Entries,
    shape: ModuleShape,
    report: Report,
) -> ModuleDelta | None:
    a, b = group.keys.get("lora_A"), group.keys.get("lora_B")
    magnitude = group.keys.get("lora_magnitude_vector")
    if a is None or b is None:
        missing = " and ".join(p for p, key in (("lora_A", a), ("lora_B", b)) if key is None)
        report.refuse(f"{missing} is missing (incomplete pair)", group.path)
        return None
    _check_dora(magnitude, config, group.path, report)
    rank = config.rank_of(group.path)
    wanted: dict[str, tuple[int, ...]] = {
        a: (rank, shape.in_features),
        b: (shape.out_features, rank),
    }
    if magnitude is not None:
        wanted[magnitude] = (shape.out_features,)
    if not _shapes_fit(entries, wanted, (a, b), group.path, report):
        return None
    return ModuleDelta(module, rank, config.scale_of(group.path), a, b, magnitude)


def _check_dora(magnitude: str | None, config: PeftConfig, path: str, report: Report) -> None:
    if config.use_dora and magnitude is None:
        report.refuse(
            "use_dora is true, but the DoRA tensor lora_magnitude_vector is missing", path
        )
    if not config.use_dora and magnitude is not None:
        report.refuse(
            "the file holds DoRA tensors (lora_magnitude_vector), use_dora is false", path
        )


def _shapes_fit(
    entries: Entries,
    wanted: Mapping[str, tuple[int, ...]],
    pair: tuple[str, str],
    path: str,
    report: Report,
) -> bool:
    """Whether all shapes are as wanted; if not, the plainest finding goes to the report."""
    if all(entries[key].shape == shape for key, shape in wanted.items()):
        return True
    a, b = (entries[key].shape for key in pair)
    (rank, in_features), (out_features, _) = (wanted[key] for key in pair)
    if 0 in a + b:
        report.refuse("empty tensors (a size is 0), perhaps of shards not gathered", path)
    elif len(a) == 2 and len(b) == 2 and (a[1], b[0]) == (in_features, out_features):
        _refuse_rank(a[0], b[1], rank, path, report)
    else:
        for key, shape in wanted.items():
            if entries[key].shape != shape:
                got, fit = list(entries[key].shape), list(shape)
                report.refuse(f"shape {got} where the base expects {fit}", key)
    return False


def _refuse_rank(rank_a: int, rank_b: int, rank: int, path: str, report: Report) -> None:
    if rank_a != rank_b:
        report.refuse(f"lora_A has rank {rank_a}, lora_B has rank {rank_b}", path)
    elif rank_a != rank:
        report.refuse(f"the weights have rank {rank_a}, adapter_config.json says {rank}", path)
    else:
        report.refuse("lora_magnitude_vector does not have the shape [out_features]", path)


def _check_max_rank(deltas: list[ModuleDelta], max_rank: int, report: Report) -> None:
    largest = max((delta.rank for delta in deltas), default=0)
    if largest > max_rank:
        report.refuse(
            f"rank {largest} is above the limit of {max_rank}: start with --max-rank {largest}"
        )


def _warn_about_targets(config: PeftConfig, groups: Mapping[str, _Group], report: Report) -> None:
    for target in config.targets:
        if not any(path == target or path.endswith("." + target) for path in groups):
            report.warn("target_modules names modules that have no tensors in the file", target)


def _warn_about_base(config: PeftConfig, base: BaseLayout, report: Report) -> None:
    if config.base_model is None or _last_part(config.base_model) == _last_part(base.name):
        return
    trained = printable(config.base_model)
    report.warn(f"the adapter names {trained} as its base; this server runs {base.name}")


def _last_part(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()
