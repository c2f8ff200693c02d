"""Reads the adapter_config.json of mlx-lm: how its LoRA layers scale, and which there are.

The file is a record of the training command. mlx-lm itself reads ``fine_tune_type``,
``num_layers`` and ``lora_parameters`` when it loads an adapter; so does this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapters.formats import peft_fields as fields
from loramux.adapters.formats.files import (
    MalformedFile,
    parse_json_object,
    read_bounded,
    refuse_placeholders,
)
from loramux.adapters.formats.meaning import BesideLora
from loramux.adapters.formats.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES
from loramux.adapters.report import Report, printable

_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,9})\.(.+)")


@dataclass(frozen=True)
class MlxConfig:
    """What of the file decides the arithmetic."""

    rank: int
    scale: float
    use_dora: bool
    num_layers: int
    """LoRA is on this many layers, the last of the model; on all when it is not positive."""
    keys: frozenset[str] | None
    """Names of adapted modules within a layer; None for those that the weight file has."""
    base_model: str | None
    swap_gate_up: bool | None = None
    """Whether up comes before gate where both are one: loramux's own field, as in PEFT's file."""
    targets: tuple[str, ...] = ()

    @property
    def beside(self) -> BesideLora:
        """mlx-lm trains nothing beside."""
        return BesideLora()

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """The same for every module: mlx-lm multiplies by ``scale`` and by nothing else."""
        return self.rank, self.scale

    def why_unused(self, module: str, base_layers: int) -> str | None:
        """Why mlx-lm would not load weights of this module, or None."""
        layer = _LAYER.search(module)
        place = place_in_layer(module) or module
        if self.keys is not None and not self.keys & {place, module}:
            return "lora_parameters.keys does not name these modules: mlx-lm would not load them"
        if layer and 0 < self.num_layers < base_layers - int(layer.group(1)):
            return f"num_layers is {self.num_layers}: mlx-lm would not load earlier layers"
        return None


def place_in_layer(module: str) -> str | None:
    """The name of a module inside its layer, as ``lora_parameters.keys`` has it."""
    layer = _LAYER.search(module)
    return layer.group(2) if layer else None


def count_layers(modules: Mapping[str, object]) -> int:
    """Number of layers of a base, from the names of its modules."""
    found = (_LAYER.search(name) for name in modules)
    return max((int(match.group(1)) + 1 for match in found if match), default=0)


def read_config(directory: Path, report: Report) -> MlxConfig | None:
    """Read the configuration; None when it cannot be used, for the reasons in ``report``."""
    try:
        data = read_bounded(directory / CONFIG_FILE, MAX_CONFIG_BYTES)
        refuse_placeholders(CONFIG_FILE, data[:256])
        raw = parse_json_object(CONFIG_FILE, data)
    except MalformedFile as problem:
        report.refuse(str(problem))
        return None
    if "peft_type" in raw:
        report.refuse(
            f"{CONFIG_FILE} is of a PEFT adapter, but the weights, adapters.safetensors, are of an "
            "mlx-lm adapter: give the configuration that mlx-lm wrote, or adapter_model.safetensors"
        )
        return None
    return _arithmetic(raw, report)


def _arithmetic(raw: Mapping[str, Any], report: Report) -> MlxConfig | None:
    kind = raw.get("fine_tune_type", "lora")
    if kind == "full":
        report.refuse(
            "fine_tune_type full: the file replaces whole weights of the base (mlx-lm); "
            "serve the fused model, or train LoRA"
        )
        return None
    if kind not in ("lora", "dora"):
        shown = printable(kind, 40) if isinstance(kind, str) else "no string"
        report.refuse(f"fine_tune_type is {shown}, only lora and dora of mlx-lm are served")
        return None
    inner = raw.get("lora_parameters")
    if not isinstance(inner, dict):
        report.refuse("lora_parameters (mlx-lm) must be an object with rank and scale")
        return None
    _check_other_parameters(inner, report)
    rank: Any = inner.get("rank")
    scale: Any = inner.get("scale")
    keys, num_layers = inner.get("keys"), raw.get("num_layers", raw.get("lora_layers"))
    swap_gate_up = raw.get("swap_gate_up")
    for fits, complaint in (
        (fields.is_rank(rank), "lora_parameters.rank must be a positive integer"),
        (fields.is_number(scale), "lora_parameters.scale must be a finite number"),
        (keys is None or _is_names(keys), "lora_parameters.keys must be a list of names or null"),
        (type(num_layers) is int, "num_layers must be an integer"),
        (
            swap_gate_up is None or isinstance(swap_gate_up, bool),
            "swap_gate_up must be true or false",
        ),
    ):
        if not fits:
            report.refuse(complaint)
    if report.refused:
        return None
    model = raw.get("model")
    return MlxConfig(
        rank=rank,
        scale=float(scale),
        use_dora=kind == "dora",
        num_layers=num_layers,
        keys=None if keys is None else frozenset(keys),
        swap_gate_up=swap_gate_up,
        base_model=model if isinstance(model, str) and model else None,
    )


def _check_other_parameters(inner: Mapping[str, Any], report: Report) -> None:
    for name, value in inner.items():
        if name in ("rank", "scale", "dropout", "keys") or not fields.is_live(value):
            continue
        if name == "alpha":
            report.refuse(
                "lora_parameters.alpha: releases of mlx-lm disagree on whether it multiplies the "
                "scale; leave it out and give the whole factor as scale"
            )
        else:
            report.unknown_field(name, "lora_parameters")


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
