"""An adapter in memory, read and checked, whatever format it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loramux.adapters.spec import LoraSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadedAdapter:
    """What an adapter does (``spec``) and its weights on the CPU, in the dtypes of the file."""

    spec: LoraSpec
    tensors: Mapping[str, torch.Tensor]
    num_bytes: int
    """Bytes of all tensors as stored."""
