"""What the tensors of an mlx-lm adapter are in PEFT's terms.

On a linear ``lora_a`` is ``[in, r]``, ``lora_b`` ``[r, out]`` and, with DoRA, ``m`` ``[out]``. On a
projection of all experts (LoRASwitchLinear) ``lora_a`` is ``[experts * r, in]`` and ``lora_b``
``[experts, out, r]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loramux.adapters.formats.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

_KEY = re.compile(r"(.+)\.(lora_a|lora_b|m)")
_SWITCH = re.compile(r"((?:.+\.)?)(?:switch_mlp|experts)\.(gate_proj|up_proj|down_proj)")
_PART = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


@dataclass(frozen=True)
class PeftTensor:
    """A tensor by PEFT's name and in PEFT's shape."""

    module: str
    """That it belongs to, as mlx-lm calls it."""
    name: str
    entry: TensorEntry
    is_turned: bool
    """Its dimensions are the other way round; else only their number may differ."""

    def of(self, stored: Tensor) -> Tensor:
        if self.is_turned:
            return stored.permute(*reversed(range(stored.dim()))).contiguous()
        return stored.view(self.entry.shape)


def in_peft_terms(key: str, entries: Mapping[str, TensorEntry]) -> PeftTensor | None:
    """None for what LoRA of mlx-lm does not have, by its name or its shape."""
    match, entry = _KEY.fullmatch(key), entries[key]
    if match is None:
        return None
    module, part = match.groups()
    switch = _SWITCH.fullmatch(module)
    if switch is None or part == "m":
        name = f"{module}.{_PART[part]}"
        return PeftTensor(module, name, replace(entry, shape=entry.shape[::-1]), is_turned=True)
    shape = _of_switch(entry, part, entries.get(f"{module}.lora_b"))
    if shape is None:
        return None
    name = f"{switch[1]}experts.{switch[2]}.{_PART[part]}"
    return PeftTensor(module, name, replace(entry, shape=shape), is_turned=False)


def _of_switch(entry: TensorEntry, part: str, b: TensorEntry | None) -> tuple[int, ...] | None:
    """``[experts, r, in]`` or ``[experts, out, r]``; how many experts there are is said by B."""
    if b is None or len(b.shape) != 3 or not b.shape[0]:
        return None
    if part == "lora_b":
        return b.shape
    if len(entry.shape) != 2 or entry.shape[0] % b.shape[0]:
        return None
    return b.shape[0], entry.shape[0] // b.shape[0], entry.shape[1]
