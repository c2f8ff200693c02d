"""An adapter as one contiguous block: every scale, dtype and layout question is settled here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from loramux.adapters.spec import BaseLayout, LoraSpec, ModuleDelta, ModuleShape
from loramux.lora.host_memory import HostBlock
from loramux.lora.own_weights import OwnTensor, OwnValues, own_elements
from loramux.lora.placements import Placement, Placements
from loramux.ops.layout import ALIGN_BYTES, NO_GAIN, pad


@dataclass(frozen=True)
class ModuleTable:
    """The modules of the base that can take LoRA; a module's index is its row in all tables."""

    names: tuple[str, ...]
    shapes: tuple[ModuleShape, ...]

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Of each module, by its name."""
        return {name: i for i, name in enumerate(self.names)}


@dataclass(frozen=True)
class HostCopy:
    """An adapter ready to be copied to a device: a block and where things are in it."""

    block: HostBlock
    placements: Placements
    own: tuple[OwnTensor, ...] = ()
    """What is there beside LoRA, behind it in the block."""
    vocab_size: int | None = None
    """Of an adapter that has more tokens than the base."""

    @property
    def num_bytes(self) -> int:
        return self.block.num_bytes

    @property
    def max_rank(self) -> int:
        return self.placements.max_rank


BaseWeight = Callable[[int], Tensor]
"""Module index -> the base's weight ``[out, in]``, for DoRA norms."""


def pack(
    spec: LoraSpec,
    tensors: Mapping[str, Tensor],
    modules: ModuleTable,
    dtype: torch.dtype,
    base_weight: BaseWeight,
    *,
    own: Sequence[OwnValues] = (),
) -> HostCopy:
    """One block, laid out as ``ops/layout.py`` says, with the scale folded into B; then ``own``.

    Deltas on different rows of one module become one: the A's stand one below the other, and each
    B in its own rows and columns, zero elsewhere. Rows without a magnitude have the gain 1. An A or
    a B that several modules have in common stands there once. Everything is computed in float32 and
    cast once to ``dtype``.
    """
    index = modules.index
    by_module = spec.by_module().items()
    # Those of routers are among ``own``.
    groups = sorted((index[name], deltas) for name, deltas in by_module if name in index)
    outline = _Outline()
    places = [outline.add(deltas, modules.shapes[module]) for module, deltas in groups]
    own_size = sum(pad(values.values.numel()) for values in own)
    block = torch.zeros(outline.num_elements + own_size, dtype=dtype)
    unit = ALIGN_BYTES // block.element_size()
    placements: list[Placement] = []
    for (module, deltas), place in zip(groups, places, strict=True):
        shape = modules.shapes[module]
        rank = sum(delta.rank for delta in deltas)
        a = _matrix(block, place.a, rank, shape.in_features)
        b = _matrix(block, place.b, shape.out_features, rank)
        gain = block[place.g : place.g + shape.out_features] if place.has_gain else block[:0]
        gain.fill_(1)
        for delta, ranks in zip(deltas, _consecutive(deltas), strict=True):
            rows = slice(None) if delta.rows is None else slice(delta.rows.start, delta.rows.stop)
            part_a = tensors[delta.a].float()
            part_b = torch.cat(delta.pick(tensors[delta.b])).float() * delta.scale
            a[ranks], b[rows, ranks] = part_a, part_b
            if delta.magnitude is not None:
                magnitude = torch.cat(delta.pick(tensors[delta.magnitude]))
                gain[rows] = dora_gain(base_weight(module)[rows], part_a, part_b, magnitude)
        placements.append(
            Placement(
                module=module,
                offset_a=place.a // unit,
                offset_b=place.b // unit,
                offset_g=place.g // unit if place.has_gain else NO_GAIN,
                rank=rank,
            )
        )
    placed = tuple(_place_own(own, block, outline.num_elements))
    return HostCopy(HostBlock((block,)), Placements.of(placements), placed, spec.vocab_size)


@dataclass(frozen=True)
class _Place:
    """Elements of a block where A, B and g of a module start; g without DoRA nowhere."""

    a: int
    b: int
    g: int
    has_gain: bool


class _Outline:
    """Where things stand in a block, module after module.

    What is packed from the same tensors in the same way is the same, so it gets the same place: the
    A of a projection that all experts share, or that of a fused linear which the base has apart.
    """

    def __init__(self) -> None:
        self.num_elements = 0
        self._known: dict[object, int] = {}

    def add(self, deltas: Sequence[ModuleDelta], shape: ModuleShape) -> _Place:
        rank = sum(delta.rank for delta in deltas)
        of_a = tuple((d.a, d.rank) for d in deltas)
        of_b = tuple((d.b, d.rank, d.scale, d.rows, d.stored_rows) for d in deltas)
        a = self._find(of_a, rank * pad(shape.in_features))
        b = self._find(of_b, shape.out_features * pad(rank))
        has_gain = any(delta.magnitude is not None for delta in deltas)
        g = self._take(pad(shape.out_features)) if has_gain else 0
        return _Place(a, b, g, has_gain)

    def _find(self, content: object, size: int) -> int:
        if content not in self._known:
            self._known[content] = self._take(size)
        return self._known[content]

    def _take(self, size: int) -> int:
        start = self.num_elements
        self.num_elements += size
        return start


def _matrix(block: Tensor, start: int, rows: int, columns: int) -> Tensor:
    """A view of a matrix in a block, without its padding."""
    return block[start : start + rows * pad(columns)].view(rows, -1)[:, :columns]


def _place_own(own: Sequence[OwnValues], block: Tensor, cursor: int) -> Iterator[OwnTensor]:
    """Put values of the adapter's own into a block, from an element on."""
    for values in own:
        placed = OwnTensor(
            values.module, values.kind, cursor, tuple(values.values.shape), values.rows
        )
        placed.view(block).copy_(values.values)
        cursor += pad(values.values.numel())
        yield placed


def _consecutive(deltas: Sequence[ModuleDelta]) -> list[slice]:
    """Rows of A and columns of B that each delta of a module has for itself."""
    ends = accumulate(delta.rank for delta in deltas)
    return [slice(end - delta.rank, end) for end, delta in zip(ends, deltas, strict=True)]


def dora_gain(weight: Tensor, a: Tensor, scaled_b: Tensor, magnitude: Tensor) -> Tensor:
    """``m / ||W + scale B A||`` per output row, in float32 (DoRA, arXiv:2402.09353, eq. 5).

    weight ``[out, in]``, a ``[r, in]``, scaled_b ``[out, r]``, magnitude ``[out]``.
    """
    delta = scaled_b.to(weight.device) @ a.to(weight.device)
    norm = torch.linalg.vector_norm(weight.float() + delta, dim=1)
    return magnitude.float() / norm.to(magnitude.device)


def packed_bytes(spec: LoraSpec, layout: BaseLayout, dtype: torch.dtype) -> int:
    """Bytes of the block that ``pack`` makes; less if values of its own equal the base's."""
    outline = _Outline()
    for name, deltas in spec.by_module().items():
        if name in layout.modules:
            outline.add(deltas, layout.modules[name])
    return (outline.num_elements + own_elements(spec, layout)) * dtype.itemsize


def block_bytes(shapes: Sequence[ModuleShape], rank: int, dtype: torch.dtype) -> int:
    """Bytes of a plain adapter of one rank on all these modules."""
    elements = sum(rank * pad(s.in_features) + s.out_features * pad(rank) for s in shapes)
    return elements * dtype.itemsize


def plain_placements(
    shapes: Mapping[int, ModuleShape], rank: int, dtype: torch.dtype
) -> Placements:
    """Where ``pack`` puts a plain adapter of one rank on these modules (rows of the table)."""
    unit = ALIGN_BYTES // dtype.itemsize
    placements: list[Placement] = []
    cursor = 0
    for module, shape in shapes.items():
        start_b = cursor + rank * pad(shape.in_features)
        placements.append(Placement(module, cursor // unit, start_b // unit, NO_GAIN, rank))
        cursor = start_b + shape.out_features * pad(rank)
    return Placements.of(placements)
