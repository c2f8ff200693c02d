"""The weight files that are read, by name, and what is in one, in PEFT's terms."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from loramux.adapters.formats import torch_header
from loramux.adapters.formats.mlx_keys import in_peft_terms
from loramux.adapters.formats.safetensors_header import TensorEntry, read_header

PEFT_FILE = "adapter_model.safetensors"
TORCH_FILE = "adapter_model.bin"
MLX_FILE = "adapters.safetensors"

WEIGHT_FILES = (PEFT_FILE, TORCH_FILE, MLX_FILE)
"""The first one that is there decides on the format."""


def weight_file_of(directory: Path) -> str | None:
    """The file that is read; None where there is none that can be."""
    return next((name for name in WEIGHT_FILES if os.path.lexists(directory / name)), None)


def read_entries(path: Path) -> Mapping[str, TensorEntry]:
    """The tensors of a weight file, by PEFT's names and in PEFT's shapes, as far as it has any.

    Raises MalformedFile.
    """
    if path.name == TORCH_FILE:
        return torch_header.read_header(path)
    entries = read_header(path)
    if path.name != MLX_FILE:
        return entries
    found = (in_peft_terms(key, entries) for key in entries)
    return {tensor.name: tensor.entry for tensor in found if tensor is not None}
