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

from loramux.adapters.formats import mlx_config, peft_config
from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.mlx_config import MlxConfig
from loramux.adapters.formats.module_names import never_served
from loramux.adapters.formats.peft_config import CONFIG_FILE, PeftConfig
from loramux.adapters.formats.peft_keys import Part, parse_key
from loramux.adapters.formats.peft_patterns import BadPattern
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.formats.weight_files import MLX_FILE, read_entries, weight_file_of
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
from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleShape
from loramux.adapters.unusual import remarks
from loramux.errors import AdapterRefused

if TYPE_CHECKING:
    from loramux.adapters.loaded import LoadedAdapter

MOST_OF_ENERGY = 0.9

_NO_BASE = "its base"

PackedBytes = Callable[[LoraSpec, Mapping[str, ModuleShape], str], int]
"""Spec, shapes of the base's modules, dtype -> bytes of the adapter's block."""


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
    is_mlx = weight_file_of(directory) == MLX_FILE
    config = (mlx_config if is_mlx else peft_config).read_config(directory, report)
    stated = Stated.of(directory)
    if config is not None and config.rank > max_rank:
        report.warn(f"rank {config.rank} is above the limit of {max_rank}")
    found = _told_by_config(directory, stated, config, report)
    dtype = found.bytes.block_dtype if base is None else base.dtype
    if _has_weights(directory):
        entries = _entries(directory)
        layout = _own_layout(stated, entries) if base is None else base.layout
        loaded = _read(directory, layout, max_rank=max_rank, lenient=lenient)
        found = replace(found, checked_against=None if base is None else layout.name)
        if isinstance(loaded, AdapterRefused):
            modules = tuple(_told_by_header(config, entries))
            tiers = TierBytes(_file_bytes(entries), None, dtype)
            found = replace(found, verdict="refused", reasons=loaded.reasons)
        else:
            modules = tuple(_told_by_spec(loaded.spec, use_rslora=bool(found.use_rslora)))
            modules = tuple(_measured(modules, loaded, base)) if measure else modules
            block = packed_bytes(loaded.spec, layout.modules, dtype)
            tiers = TierBytes(_file_bytes(entries), block, dtype)
            found = replace(found, verdict="serveable", unusual=loaded.spec.warnings)
        found = replace(found, modules=modules, layers=tuple(_layers(modules)), bytes=tiers)
    peft = config if isinstance(config, PeftConfig) else None
    more = remarks(stated, peft, found.modules, base)
    return replace(found, unusual=(*found.unusual, *more))


def _told_by_config(
    directory: Path, stated: Stated, config: PeftConfig | MlxConfig | None, report: Report
) -> Inspection:
    """All that is known before the weights are looked at."""
    peft = config if isinstance(config, PeftConfig) else None
    is_mlx = isinstance(config, MlxConfig)
    return Inspection(
        verdict="refused" if report.refused else "config only",
        reasons=report.reasons,
        checked_against=None,
        unusual=report.warnings,
        adapter=str(directory),
        format="mlx" if is_mlx else "peft",
        peft_version=stated.text("peft_version"),
        base_model=config.base_model if is_mlx else stated.text("base_model_name_or_path"),
        revision=stated.text("revision"),
        rank=None if config is None else config.rank,
        alpha=config.scale * config.rank if is_mlx else (None if peft is None else peft.alpha),
        use_rslora=False if is_mlx else (None if peft is None else peft.use_rslora),
        use_dora=None if config is None else config.use_dora,
        bytes=TierBytes(None, None, "bfloat16"),
    )


def _has_weights(directory: Path) -> bool:
    """Whether there is a file beside the configuration that some tool takes for the weights."""
    kinds = ("adapter*", "*.nemo", "model_weights.ckpt")
    return any(path.name != CONFIG_FILE for kind in kinds for path in directory.glob(kind))


def _read(
    directory: Path, layout: BaseLayout, *, max_rank: int, lenient: bool
) -> LoadedAdapter | AdapterRefused:
    from loramux.adapters.formats.reader import read_adapter  # loads torch

    try:
        return read_adapter(directory.name, directory, layout, max_rank=max_rank, lenient=lenient)
    except AdapterRefused as refusal:
        return refusal


def _entries(directory: Path) -> Mapping[str, TensorEntry]:
    """The tensors of the weight file; none where it is unreadable, which the reader refuses."""
    weight_file = weight_file_of(directory)
    if weight_file is None:
        return {}
    try:
        return read_entries(directory / weight_file)
    except MalformedFile:
        return {}


def _file_bytes(entries: Mapping[str, TensorEntry]) -> int | None:
    return sum(entry.end - entry.start for entry in entries.values()) if entries else None


def _shapes(entries: Mapping[str, TensorEntry]) -> Mapping[str, Mapping[Part, tuple[int, ...]]]:
    """Shapes of A, B and the magnitude by the adapter's own name of the module."""
    found: dict[str, dict[Part, tuple[int, ...]]] = defaultdict(dict)
    for key, entry in entries.items():
        parsed = parse_key(key)
        if parsed is not None:
            found[parsed.path][parsed.part] = entry.shape
    return found


def _own_layout(stated: Stated, entries: Mapping[str, TensorEntry]) -> BaseLayout:
    """The base that the tensors tell of: what they agree on among themselves is right."""
    modules = {
        path: ModuleShape(
            next(reversed(parts.get("lora_A", ())), 0), next(iter(parts.get("lora_B", ())), 0)
        )
        for path, parts in _shapes(entries).items()
        if never_served(path) is None
    }
    # With the name that the adapter gives, so that no other name is remarked upon.
    return BaseLayout(stated.text("base_model_name_or_path") or _NO_BASE, modules)


def _told_by_header(
    config: PeftConfig | MlxConfig | None, entries: Mapping[str, TensorEntry]
) -> Iterator[ModuleFacts]:
    """What names and shapes say where the adapter as a whole says nothing that can be trusted."""
    for path, parts in _shapes(entries).items():
        rank, scale = _rank_and_scale(config, path)
        alpha = None
        if config is not None and rank is not None and scale is not None:
            rslora = isinstance(config, PeftConfig) and config.use_rslora
            alpha = _alpha(rank, scale, use_rslora=rslora)
        rank = next(iter(parts.get("lora_A", ())), rank)
        kind, layer = place(path)
        yield ModuleFacts(module=path, kind=kind, layer=layer, rank=rank, alpha=alpha, scale=scale)


def _rank_and_scale(
    config: PeftConfig | MlxConfig | None, path: str
) -> tuple[int | None, float | None]:
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
