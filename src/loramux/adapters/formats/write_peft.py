"""Writes an adapter as PEFT saves one, with the key spelling of today."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from loramux.adapters.formats.peft_config import CONFIG_FILE
from loramux.adapters.formats.peft_numbers import alpha_of, as_pattern, as_targets
from loramux.adapters.formats.weight_files import PEFT_FILE
from loramux.adapters.plain import PlainModule
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout

_PREFIX = "base_model.model."


def write_peft(
    folder: Path,
    modules: Sequence[PlainModule],
    base: BaseLayout,
    *,
    trained_on: str,
    use_rslora: bool,
    report: Report,
) -> None:
    """Write both files; nothing is written where ``report`` gets a reason against it.

    ``use_rslora``: the kind of scale to try first, the adapter's own.
    """
    alphas = _alphas(modules, use_rslora, report)
    if alphas is None:
        return
    use_rslora, by_name = alphas
    rank, rank_pattern = as_pattern({module.name: module.rank for module in modules})
    alpha, alpha_pattern = as_pattern(by_name)
    names = {module.name for module in modules}
    parts = {part for fusion in base.fusions for part in fusion.parts}
    others = ({*base.modules, *base.other_modules} | parts) - names
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": trained_on,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": use_rslora,
        "use_dora": any(module.magnitude is not None for module in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": as_targets((module.name for module in modules), others),
    }
    save_file(_tensors(modules), folder / PEFT_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _alphas(
    modules: Sequence[PlainModule], use_rslora: bool, report: Report
) -> tuple[bool, Mapping[str, float]] | None:
    """Alphas by module in the one kind of scale or in the other, exactly."""
    for kind in (use_rslora, not use_rslora):
        found = {m.name: alpha_of(m.scale, m.rank, use_rslora=kind) for m in modules}
        exact = {name: _plain_number(alpha) for name, alpha in found.items() if alpha is not None}
        if len(exact) == len(modules):
            return kind, exact
    for module in modules:
        if alpha_of(module.scale, module.rank, use_rslora=use_rslora) is None:
            report.refuse(
                f"no alpha of PEFT gives exactly the scale {module.scale!r} at rank {module.rank}",
                module.name,
            )
    return None


def _plain_number(value: float) -> float:
    """32.0 as 32, the way PEFT writes it."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _tensors(modules: Sequence[PlainModule]) -> dict[str, Tensor]:
    """Each with memory of its own: several linears may share one A."""
    found: dict[str, Tensor] = {}
    for module in modules:
        stem = _PREFIX + module.name
        found[f"{stem}.lora_A.weight"] = module.a
        found[f"{stem}.lora_B.weight"] = module.b
        if module.magnitude is not None:
            found[f"{stem}.lora_magnitude_vector"] = module.magnitude
    return {key: tensor.clone().contiguous() for key, tensor in found.items()}
