"""An adapter as one contiguous block: every scale, dtype and layout question is settled here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.adapters.spec import LoraSpec, ModuleDelta, ModuleShape
from loramux.ops.layout import ALIGN_BYTES, NO_GAIN, pad


@dataclass(frozen=True)
class ModuleTable:
    """The modules of the base that can take LoRA; a module's index is its row in all tables."""

    names: tuple[str, ...]
    shapes: tuple[ModuleShape, ...]

    def __len__(self) -> int:
        return len(self.names)

    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}


@dataclass(frozen=True)
class Placement:
    """Where one module's weights stand in a block; offsets in units of ALIGN_BYTES."""

    module: int
    rank: int
    offset_a: int
    offset_b: int
    offset_g: int = NO_GAIN
    has_gain: bool = False


@dataclass(frozen=True)
class HostCopy:
    """An adapter ready to be copied to a device: a flat block and where things are in it."""

    block: Tensor
    placements: tuple[Placement, ...]

    @property
    def num_bytes(self) -> int:
        return self.block.numel() * self.block.element_size()

    @property
    def max_rank(self) -> int:
        return max(placement.rank for placement in self.placements)


BaseWeight = Callable[[int], Tensor]
"""Module index -> the base's weight ``[out, in]``, for DoRA norms."""


def pack(
    spec: LoraSpec,
    tensors: Mapping[str, Tensor],
    modules: ModuleTable,
    dtype: torch.dtype,
    base_weight: BaseWeight,
    *,
    pinned: bool = False,
) -> HostCopy:
    """One block, laid out as ``ops/layout.py`` says, with the scale folded into B.

    Everything is computed in float32 and cast once to ``dtype``. ``pinned``: into memory from which
    a GPU copies by itself.
    """
    index = modules.index()
    deltas = sorted(spec.deltas, key=lambda delta: index[delta.module])
    sizes = [_num_elements(delta, modules.shapes[index[delta.module]]) for delta in deltas]
    block = torch.zeros(sum(map(sum, sizes)), dtype=dtype, pin_memory=pinned)
    unit = ALIGN_BYTES // block.element_size()
    placements = []
    cursor = 0
    for delta, parts in zip(deltas, sizes, strict=True):
        module = index[delta.module]
        shape = modules.shapes[module]
        start_a, start_b, start_g = cursor, cursor + parts[0], cursor + parts[0] + parts[1]
        cursor += sum(parts)
        a = tensors[delta.a].float()
        b = tensors[delta.b].float() * delta.scale
        block[start_a:start_b].view(delta.rank, -1)[:, : shape.in_features] = a
        block[start_b:start_g].view(shape.out_features, -1)[:, : delta.rank] = b
        if delta.magnitude is not None:
            gain = dora_gain(base_weight(module), a, b, tensors[delta.magnitude])
            block[start_g : start_g + shape.out_features] = gain
        placements.append(
            Placement(
                module=module,
                rank=delta.rank,
                offset_a=start_a // unit,
                offset_b=start_b // unit,
                offset_g=start_g // unit if delta.magnitude is not None else NO_GAIN,
                has_gain=delta.magnitude is not None,
            )
        )
    return HostCopy(block, tuple(placements))


def dora_gain(weight: Tensor, a: Tensor, scaled_b: Tensor, magnitude: Tensor) -> Tensor:
    """``m / ||W + scale B A||`` per output row, in float32 (DoRA, arXiv:2402.09353, eq. 5).

    weight ``[out, in]``, a ``[r, in]``, scaled_b ``[out, r]``, magnitude ``[out]``.
    """
    delta = scaled_b.to(weight.device) @ a.to(weight.device)
    norm = torch.linalg.vector_norm(weight.float() + delta, dim=1)
    return magnitude.float() / norm.to(magnitude.device)


def block_bytes(shapes: Sequence[ModuleShape], rank: int, dtype: torch.dtype) -> int:
    """Bytes of a plain adapter of one rank on all these modules."""
    elements = sum(rank * pad(s.in_features) + s.out_features * pad(rank) for s in shapes)
    return elements * dtype.itemsize


def _num_elements(delta: ModuleDelta, shape: ModuleShape) -> tuple[int, int, int]:
    a = delta.rank * pad(shape.in_features)
    b = shape.out_features * pad(delta.rank)
    g = pad(shape.out_features) if delta.magnitude is not None else 0
    return a, b, g
