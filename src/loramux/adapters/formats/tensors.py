"""Reads the tensors that a header describes, and checks their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from loramux.adapters.formats.files import MalformedFile, open_regular
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.formats.torch_header import TorchEntry
from loramux.adapters.report import Report
from loramux.adapters.spec import LoraSpec

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_safetensors(path: Path, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Copies of all tensors, so that nothing depends on the file afterwards.

    Raises MalformedFile when the file is no longer what ``entries`` says.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {key: file.get_tensor(key).clone() for key in entries}
    except (OSError, SafetensorError):
        raise _changed(path) from None
    if any(tuple(t.shape) != entries[key].shape for key, t in tensors.items()):
        raise _changed(path)
    return tensors


def read_torch(path: Path, entries: Mapping[str, TorchEntry]) -> dict[str, torch.Tensor]:
    """The same for a file of torch.save: bytes become numbers, and no pickle is run."""
    file, _ = open_regular(path)
    tensors: dict[str, torch.Tensor] = {}
    with file:
        for key, entry in entries.items():
            file.seek(entry.start)
            data = bytearray(file.read(entry.end - entry.start))
            if len(data) != entry.end - entry.start:
                raise _changed(path)
            flat = torch.frombuffer(data, dtype=torch.uint8).view(_TORCH_DTYPES[entry.dtype])
            view = torch.as_strided(flat, entry.shape, entry.stride)
            tensors[key] = view.clone(memory_format=torch.contiguous_format)
    return tensors


def check_values(spec: LoraSpec, tensors: Mapping[str, torch.Tensor], report: Report) -> None:
    """Refuse what is not finite, and an adapter that would change nothing."""
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            report.refuse("tensors hold values that are not finite (NaN or infinite)", key)
    for own in spec.replacements:
        if own.twin is not None and not torch.equal(tensors[own.tensor], tensors[own.twin]):
            report.refuse(
                "embedding and head are one weight in the base, and differ in the file", own.tensor
            )
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


def _changed(path: Path) -> MalformedFile:
    return MalformedFile(f"{path.name} changed while it was read: load it again")


def _nonzero(tensor: torch.Tensor) -> bool:
    return bool(tensor.float().any())


def _largest_float32(tensor: torch.Tensor, scale: float) -> float:
    """Largest magnitude in ``scale * tensor``, as the float32 arithmetic of loading gives it."""
    return float((tensor.float().abs().max() * scale).item())
