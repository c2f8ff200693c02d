"""Reads the tensors that a header describes, and checks their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from loramux.adapters.formats.files import MalformedFile, open_regular
from loramux.adapters.formats.safetensors_header import SafetensorsFile, TensorEntry
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

_WITH_EXTREMES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that aminmax knows, without those that hold more than float32."""
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def read_safetensors(file: SafetensorsFile) -> dict[str, torch.Tensor]:
    """All tensors, as views of one copy of the file's data, on which nothing else depends.

    Raises MalformedFile when the file has changed since its header was read.
    """
    data = torch.empty(max((e.end for e in file.entries.values()), default=0), dtype=torch.uint8)
    opened, _ = open_regular(file.path)
    with opened:
        if opened.read(len(file.head)) != file.head:
            raise _changed(file.path)
        if opened.readinto(data.numpy().data) != len(data):
            raise _changed(file.path)
    return {key: _view(data, entry) for key, entry in file.entries.items()}


def _view(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a file's data; a copy if it does not stand where its numbers may."""
    dtype = _TORCH_DTYPES[entry.dtype]
    piece = data[entry.start : entry.end]
    if entry.start % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(entry.shape)


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


def check_values(spec: LoraSpec, stored: Mapping[str, torch.Tensor], report: Report) -> None:
    """Refuse what is not finite, and an adapter that would change nothing.

    ``stored``: the file's tensors, of which ``spec.shares`` are parts.
    """
    largest = {key: _largest(tensor) for key, tensor in stored.items()}
    for key, value in largest.items():
        if not math.isfinite(value):
            report.refuse("tensors hold values that are not finite (NaN or infinite)", key)
    for own in spec.replacements:
        if own.twin is not None and not torch.equal(stored[own.tensor], stored[own.twin]):
            report.refuse(
                "embedding and head are one weight in the base, and differ in the file", own.tensor
            )
    shares = {share.name: share for share in spec.shares}
    largest |= {name: largest[share.source] for name, share in shares.items()}
    for delta in spec.deltas:
        if not largest[delta.b] * abs(delta.scale) <= _LARGEST_FLOAT32:
            report.refuse(f"scale {delta.scale:g} makes lora_B overflow float32", delta.module)

    def is_zero(name: str) -> bool:
        share = shares.get(name)
        zero = largest[name] == 0
        return zero or (share is not None and _largest(share.cut(stored[share.source])) == 0)

    if all(
        delta.magnitude is None and (delta.scale == 0 or is_zero(delta.b) or is_zero(delta.a))
        for delta in spec.deltas
    ):
        report.refuse(
            "the adapter would change nothing: lora_B (or lora_A or the scale) is zero everywhere"
        )


def _changed(path: Path) -> MalformedFile:
    return MalformedFile(f"{path.name} changed while it was read: load it again")


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude, as float32 has it: infinite or NaN where a value is."""
    # The two extremes are found many times faster than a mask of what is finite.
    known = tensor if tensor.dtype in _WITH_EXTREMES else tensor.float()
    lowest, highest = known.aminmax()
    return max(-lowest.item(), highest.item())
