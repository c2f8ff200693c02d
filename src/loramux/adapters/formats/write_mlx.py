"""Writes an adapter as mlx-lm saves one, where it can say the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from loramux.adapters.experts import inside
from loramux.adapters.formats.mlx_config import place_in_layer
from loramux.adapters.formats.peft_config import CONFIG_FILE
from loramux.adapters.formats.weight_files import MLX_FILE
from loramux.adapters.plain import PlainModule
from loramux.adapters.report import Report

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def write_mlx(
    folder: Path, modules: Sequence[PlainModule], *, trained_on: str, report: Report
) -> None:
    """Write both files; nothing is written where ``report`` gets a reason against it."""
    _check(modules, report)
    if report.refused:
        return
    first = modules[0]
    config = {
        "fine_tune_type": "lora" if first.magnitude is None else "dora",
        "model": trained_on,
        "num_layers": -1,
        "lora_parameters": {
            "rank": first.rank,
            "scale": first.scale,
            "dropout": 0.0,
            "keys": list(dict.fromkeys(str(place_in_layer(module.name)) for module in modules)),
        },
    }
    save_file(_tensors(modules), folder / MLX_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=4) + "\n", encoding="utf-8")


def _check(modules: Sequence[PlainModule], report: Report) -> None:
    ranks = sorted({module.rank for module in modules})
    scales = sorted({module.scale for module in modules})
    if len(ranks) > 1:
        report.refuse(f"mlx-lm has one rank for all modules, here are {_shown(ranks)}")
    if len(scales) > 1:
        report.refuse(f"mlx-lm has one scale for all modules, here are {_shown(scales)}")
    for module in modules:
        if module.is_part:
            report.refuse("the base has this inside a fused linear, so mlx-lm has", module.name)
        if inside(module.name) is not None:
            report.refuse("mlx-lm has all experts in one tensor, which is not written", module.name)
        if place_in_layer(module.name) is None:
            report.refuse("mlx-lm has LoRA inside of layers only", module.name)
        for tensor in (module.a, module.b, module.magnitude):
            if tensor is not None and tensor.dtype not in _DTYPES:
                dtype = str(tensor.dtype).removeprefix("torch.")
                report.refuse(f"mlx-lm does not read {dtype}", module.name)


def _shown(values: Sequence[float]) -> str:
    more = f" and {len(values) - 8} more" if len(values) > 8 else ""
    return ", ".join(f"{value:g}" for value in values[:8]) + more


def _tensors(modules: Sequence[PlainModule]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in modules:
        found[f"{module.name}.lora_a"] = module.a.t()
        found[f"{module.name}.lora_b"] = module.b.t()
        if module.magnitude is not None:
            found[f"{module.name}.m"] = module.magnitude
    return {
        key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in found.items()
    }
