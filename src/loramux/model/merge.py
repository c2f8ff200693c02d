"""A base with one adapter folded into its weights, as a checkpoint of its own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from loramux.adapters.experts import inside
from loramux.adapters.loaded import LoadedAdapter, refuse_leftovers
from loramux.adapters.report import Report
from loramux.adapters.spec import ModuleDelta
from loramux.errors import ModelNotServable
from loramux.lora.weights import dora_gain
from loramux.model.anatomy import linear_weight
from loramux.model.experts import expert_weight, find_experts
from loramux.model.load import read_config

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "tekken.json", "spiece.model",
)  # fmt: skip

_GENERATION = "generation_config.json"


def merge(path: str, adapter: LoadedAdapter, name: str) -> PreTrainedModel:
    """The model in directory ``path``, in its own dtype, with the adapter's deltas added.

    Raises AdapterRefused, with ``name``, when a weight cannot take its delta, and ConfigError or
    ModelNotServable.
    """
    path, config = read_config(path)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelNotServable(path, "it is quantised, so nothing can be added to its weights")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotServable(path, f"it does not load as a causal model: {error}") from error
    assert isinstance(model, PreTrainedModel)
    fold(model, adapter, name)
    return model


def fold(model: PreTrainedModel, adapter: LoadedAdapter, name: str) -> None:
    """Add the deltas in place, each weight rounded once. Raises AdapterRefused."""
    report = Report()
    refuse_leftovers(adapter, report)
    owners = _owners(model)
    experts = find_experts(model, any_gate=True)
    with torch.no_grad():
        for module, deltas in adapter.spec.by_module().items():
            place = inside(module)
            if place is not None and place.experts in experts:
                weight = expert_weight(model, module)
            else:
                weight = linear_weight(model.get_submodule(module))
            shared = [other for other in owners.get(weight.data_ptr(), ()) if other != module]
            if shared:
                report.refuse(f"the base has this weight in {shared[0]} as well (tied)", module)
                continue
            merged = merged_weight(weight, deltas, adapter).to(weight.dtype)
            if not merged.isfinite().all():
                report.refuse(f"the sum is not finite in {weight.dtype}", module)
            weight.copy_(merged)
    report.raise_if_refused(name)


def merged_weight(weight: Tensor, deltas: Sequence[ModuleDelta], adapter: LoadedAdapter) -> Tensor:
    """``g * (W + scale * B A)`` in float32, ``[out, in]``; rows without a delta as they are."""
    merged = weight.float().clone()
    for delta in deltas:
        rows = slice(None) if delta.rows is None else slice(delta.rows.start, delta.rows.stop)
        a = adapter.tensors[delta.a].float()
        b = torch.cat(delta.pick(adapter.tensors[delta.b])).float() * delta.scale
        gain: Tensor | None = None
        if delta.magnitude is not None:
            magnitude = torch.cat(delta.pick(adapter.tensors[delta.magnitude]))
            gain = dora_gain(merged[rows], a, b, magnitude)
        merged[rows] += b @ a
        if gain is not None:
            merged[rows] *= gain[:, None]
    return merged


def save(model: PreTrainedModel, base: Path, folder: Path) -> None:
    """Write the whole checkpoint, with what ``base`` says of text and sampling as it is."""
    # Some that have long been published are refused by transformers when it saves them.
    model.generation_config = GenerationConfig()
    model.save_pretrained(str(folder))
    (folder / _GENERATION).unlink(missing_ok=True)
    for name in (*_TOKENIZER_FILES, _GENERATION):
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Modules by the place of their weight in memory: tied ones have the same."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            found.setdefault(weight.data_ptr(), []).append(name)
    return found
