"""Reads a PEFT adapter directory: all of it exactly, or a refusal with every reason.

First the configuration and the names and shapes of the weights, then the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.peft_config import read_config
from loramux.adapters.formats.peft_spec import build_spec
from loramux.adapters.formats.safetensors_header import TensorEntry, read_header
from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, LoraSpec

WEIGHT_FILE = "adapter_model.safetensors"

_OTHER_WEIGHT_FILES = {
    "adapter_model.bin": "a pickle, which can run code when it is read: convert it to safetensors",
    "adapters.safetensors": "of an mlx-lm adapter: convert it to the PEFT format",
    "adapters.npz": "of an mlx-lm adapter: convert it to the PEFT format",
    "adapter_model.safetensors.index.json": "the index of a sharded file: save it as one file",
}


def read_peft(name: str, directory: Path, base: BaseLayout, *, max_rank: int) -> LoadedAdapter:
    """Read and check the adapter in ``directory`` for ``base``; weights stay on the CPU.

    ``name`` is only used in errors. Raises AdapterRefused, with all that is wrong.
    """
    report = Report()
    config = read_config(directory, report)
    entries = _read_weight_header(directory, report)
    spec = None
    if config is not None and entries is not None:
        spec = build_spec(config, entries, base, max_rank=max_rank, report=report)
    report.raise_if_refused(name)
    assert spec is not None, "nothing was refused, so there is a spec"
    assert entries is not None
    tensors = _read_tensors(directory / WEIGHT_FILE, entries, report)
    _check_values(spec, tensors, report)
    report.raise_if_refused(name)
    return LoadedAdapter(spec, tensors, sum(t.nbytes for t in tensors.values()))


def _read_weight_header(directory: Path, report: Report) -> Mapping[str, TensorEntry] | None:
    path = directory / WEIGHT_FILE
    try:
        return read_header(path)
    except MalformedFile as problem:
        found = [n for n in _OTHER_WEIGHT_FILES if (directory / n).exists()]
        if found and not path.exists():
            report.refuse(
                f"{WEIGHT_FILE} is missing; {found[0]} is {_OTHER_WEIGHT_FILES[found[0]]}"
            )
        else:
            report.refuse(str(problem))
        return None


def _read_tensors(
    path: Path, entries: Mapping[str, TensorEntry], report: Report
) -> dict[str, torch.Tensor]:
    """Copies of all tensors, so that nothing depends on the file afterwards."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {key: file.get_tensor(key).clone() for key in entries}
    except (OSError, SafetensorError):
        report.refuse(f"{path.name} is unreadable, or changed while it was read: load it again")
        return {}
    if any(tuple(t.shape) != entries[key].shape for key, t in tensors.items()):
        report.refuse(f"{path.name} changed while it was read: load it again")
    return tensors


def _check_values(spec: LoraSpec, tensors: Mapping[str, torch.Tensor], report: Report) -> None:
    if report.refused:
        return
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            report.refuse("tensors hold values that are not finite (NaN or infinite)", key)
    for delta in spec.deltas:
        if not math.isfinite(_largest_float32(tensors[delta.b], delta.scale)):
            report.refuse(f"scale {delta.scale:g} makes lora_B overflow float32", delta.module)
    if not any(
        delta.magnitude is not None
        or (delta.scale != 0 and _nonzero(tensors[delta.b]) and _nonzero(tensors[delta.a]))
        for delta in spec.deltas
    ):
        report.refuse(
            "the adapter would change nothing: lora_B (or lora_A or the scale) is zero everywhere"
        )


def _nonzero(tensor: torch.Tensor) -> bool:
    return bool(tensor.float().any())


def _largest_float32(tensor: torch.Tensor, scale: float) -> float:
    """Largest magnitude in ``scale * tensor``, as the float32 arithmetic of loading gives it."""
    return float((tensor.float().abs().max() * scale).item())
