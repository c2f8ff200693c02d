"""The weight files that are read, by name, and what is in one, in PEFT's terms."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loramux.adapters.formats import torch_header
from loramux.adapters.formats.safetensors_header import TensorEntry, read_header

PEFT_FILE = "adapter_model.safetensors"
TORCH_FILE = "adapter_model.bin"
MLX_FILE = "adapters.safetensors"

WEIGHT_FILES = (PEFT_FILE, TORCH_FILE, MLX_FILE)
"""The first one that is there decides on the format."""

_MLX_KEY = re.compile(r"(.+)\.(lora_a|lora_b|m)")
_PEFT_PART = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


def weight_file_of(directory: Path) -> str | None:
    """The file that is read; None where there is none that can be."""
    return next((name for name in WEIGHT_FILES if os.path.lexists(directory / name)), None)


def module_of_mlx_key(key: str) -> str | None:
    """The module that a tensor of mlx-lm belongs to; None for what its LoRA does not have."""
    match = _MLX_KEY.fullmatch(key)
    return None if match is None else match[1]


def peft_key(mlx_key: str) -> str:
    """PEFT's name of a tensor of mlx-lm's LoRA."""
    module, _, part = mlx_key.rpartition(".")
    return f"{module}.{_PEFT_PART[part]}"


def read_entries(path: Path) -> Mapping[str, TensorEntry]:
    """The tensors of a weight file, by PEFT's names and in PEFT's shapes, as far as it has any.

    Raises MalformedFile.
    """
    if path.name == TORCH_FILE:
        return torch_header.read_header(path)
    entries = read_header(path)
    if path.name != MLX_FILE:
        return entries
    return {
        peft_key(key): replace(entry, shape=entry.shape[::-1])
        for key, entry in entries.items()
        if module_of_mlx_key(key) is not None
    }
