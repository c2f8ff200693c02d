"""What a LoRA backend must do. One is chosen at start, logged, and used for every step."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from loramux.ops.expert_tiles import Mixture


@dataclass(frozen=True, slots=True)
class Slice:
    """One module's part of a site's output: columns ``start … start + size - 1``."""

    module: int
    """Row of the slot tables."""
    start: int
    size: int


@dataclass(frozen=True)
class Site:
    """One linear of the base as it runs; a fused one has a slice for each module in it.

    Slices follow one another, in the tables as in the output.
    """

    slices: tuple[Slice, ...]
    in_features: int
    bias: Tensor | None
    """The base's bias ``[out]``, which y already contains and which DoRA's gain must not scale."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``start … end - 1`` of the sorted order; all of one slot, never the base's."""

    slot: int
    start: int
    end: int


class DeviceSegments(Protocol):
    """Segments cut to at most ``block_rows`` rows, on the device; ``lora.segments`` fills them.

    ``slot``, ``start`` and ``rows`` (each ``[capacity]`` int32): segment i is ``rows[i]`` rows of
    ``slot[i]`` from ``start[i]`` on in sorted order. The base's rows have segments, too. Entries
    beyond the step's own have no rows.
    """

    slot: Tensor
    start: Tensor
    rows: Tensor
    block_rows: int
    grid: int
    """Entries that a kernel must look at; depends on the step's bucket alone, and on whether its
    adapters are few."""


class Routing(Protocol):
    """Token -> slot of this step; ``lora.routing`` owns and fills it.

    ``token_slot [T]`` int32: slot of each row. ``sorted_rows [T]`` int32: the rows in stable order
    of slot, the base's last. ``slot_start [slots + 2]`` int32: where each slot's rows begin in that
    order; the last entry is T. Rows beyond ``num_tokens`` point at the base slot.
    """

    token_slot: Tensor
    sorted_rows: Tensor
    slot_start: Tensor
    num_tokens: int
    segments: tuple[Segment, ...]
    """Host copy of the sorted order's runs; empty when only the base takes part."""
    in_order: bool
    """The rows stand in sorted order already, so ``sorted_rows`` is 0, 1, 2, …"""

    @property
    def adapter_rows(self) -> Tensor:
        """int64: ``sorted_rows`` without the base's, for torch's own indexing."""
        ...

    @property
    def device_segments(self) -> DeviceSegments: ...


class SlotTables(Protocol):
    """Where weights stand: a record of ``ops/layout.py`` for each module and slot.

    ``lora.slots`` owns and writes them. ``table`` ``[modules, slots + 1, 4]`` int64 is on the
    device, ``host`` is the same as a numpy array. Rank 0 means "no weights here".
    """

    table: Tensor
    host: np.ndarray
    version: list[int]
    """Grows with every change of a slot's column, so that what was derived from it can tell."""


class LoraOps(Protocol):
    """The LoRA op over all rows of a step."""

    name: str

    @property
    def experts(self) -> int | None:
        """The number by which ``ops.opaque`` finds kernels for a mixture's experts; None: there
        are none, and experts are computed one after the other."""
        ...

    def begin_step(self, max_rank: int, *, few: bool) -> None:
        """Say how large the ranks of the next step's adapters are, and whether these are few."""
        ...

    def lora_add_(
        self, y: Tensor, x: Tensor, site: Site, arena: Tensor, tables: SlotTables, routing: Routing
    ) -> None:
        """Semantics, for every row t and every slice whose module has rank > 0 in t's slot:

            y[t] = g * (y[t] - bias + B (A x[t])) + bias        (g = 1 without DoRA)

        y ``[T, out]`` and x ``[T, in]``; A ``[r, in]``, B ``[out, r]`` (scale folded in) and
        g ``[out]`` stand in ``arena`` where ``tables`` says. Rows of the base slot keep every bit.
        """
        ...


@runtime_checkable
class CompiledOps(LoraOps, Protocol):
    """A LoRA op by kernels that are compiled; it can run inside compiled layers and be captured."""

    number: int
    """By which ``ops.opaque`` finds it."""

    @property
    def rank_buckets(self) -> tuple[int, ...]:
        """Largest ranks that launches can be made for."""
        ...

    def bind(self, arena: Tensor, routing: Routing) -> None: ...

    def bucket_of(self, max_rank: int) -> int: ...

    def compiling(self) -> AbstractContextManager[None]:
        """What is launched inside does not run: its kernels are compiled, many at a time."""
        ...

    def kernels_of(
        self,
        num_rows: int,
        *,
        rank_bucket: int,
        few: bool,
        mixtures: Collection[Mixture] = (),
        dtype: torch.dtype,
    ) -> Hashable:
        """The same for steps that launch the same kernels, if their form is the same.

        ``mixtures``: of the model's layers. For more rows it never comes back to what it was for
        fewer.
        """
        ...
