"""Times tiles of the LoRA kernels as a captured step launches them.

For each shape there are several copies of the base's weight and of all adapters, so many that
nothing of a copy is in the cache when its turn comes again. A CUDA graph of base products with the
LoRA op beside them is compared with one of the products alone. Few adapters are measured with one,
many with as many as there are slots, row after row another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from loramux.adapters.spec import ModuleShape
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.weights import block_bytes, plain_placements
from loramux.ops.compile_ahead import compiled_at_once
from loramux.ops.interface import Site, Slice
from loramux.ops.layout import ALIGN_BYTES
from loramux.ops.lora_launches import (
    Launch,
    compile_kernel,
    run_kernel,
    side_stream,
)
from loramux.ops.reference import ReferenceOps
from loramux.ops.tiles import FEW_ADAPTERS, LONG_FROM, FixedTiles, Tiles
from loramux.ops.triton_lora import TritonOps
from loramux.ops.tuning import Shape
from loramux.types import Slot
from loramux.worker.capture import added_microseconds, capture, rehearse

_CACHE_ROUNDS = 4
"""Bytes of base weights between two uses of a copy, in sizes of the GPU's cache."""
_PRODUCTS = 24
"""Base products in one graph, at least; a quarter of it in long steps."""
_MAX_ERROR = 2e-2
"""Of a delta, relative to its size; bfloat16 rounds twice on the way."""


def copies_for(shape: Shape, cache_bytes: int) -> int:
    """Copies of a site after which nothing of the first is in the cache."""
    weight_bytes = shape.in_features * sum(shape.sizes) * torch.bfloat16.itemsize
    return max(2, -(-_CACHE_ROUNDS * cache_bytes // weight_bytes))


class SiteCopies:
    """Copies of one site with random weights, and a random adapter in each slot."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        num_slots: int,
        num_copies: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.shape, self.rank, self.num_slots = shape, rank, num_slots
        self.device, self.dtype = device, dtype
        columns = sum(shape.sizes)
        self.weights = [
            torch.randn(columns, shape.in_features, device=device, dtype=dtype) * 0.01
            for _ in range(num_copies)
        ]
        starts = list(itertools.accumulate(shape.sizes, initial=0))
        self.sites = [
            Site(
                tuple(
                    Slice(copy * len(shape.sizes) + i, starts[i], size)
                    for i, size in enumerate(shape.sizes)
                ),
                shape.in_features,
                None,
            )
            for copy in range(num_copies)
        ]
        self.tables = SlotTables(num_copies * len(shape.sizes), num_slots, device)
        num_elements = self._place_adapters()
        self.arena = torch.randn(num_elements, device=device, dtype=dtype) * 0.02

    def _place_adapters(self) -> int:
        """Give every adapter its place; the arena's length."""
        unit = ALIGN_BYTES // self.dtype.itemsize
        shapes = {
            part.module: ModuleShape(self.shape.in_features, part.size)
            for site in self.sites
            for part in site.slices
        }
        placements = plain_placements(shapes, self.rank, self.dtype)
        length = block_bytes(list(shapes.values()), self.rank, self.dtype) // self.dtype.itemsize
        for slot in range(self.num_slots):
            self.tables.set(Slot(slot), placements, slot * length // unit)
        self.tables.flush()
        return self.num_slots * length


class Step:
    """A step over copies of a site: each row of another of so many adapters, again and again."""

    def __init__(self, copies: SiteCopies, num_rows: int, num_adapters: int) -> None:
        self.copies = copies
        device, dtype = copies.device, copies.dtype
        self._few = num_adapters <= FEW_ADAPTERS
        self.routing = Routing(copies.num_slots, num_rows, device)
        slots = [Slot(row % num_adapters) for row in range(num_rows)]
        self.routing.fill(slots, [1] * num_rows, few=self._few)
        self._x = torch.randn(num_rows, copies.shape.in_features, device=device, dtype=dtype)
        self._y = torch.empty(num_rows, sum(copies.shape.sizes), device=device, dtype=dtype)
        self._delta = torch.empty_like(self._y)
        self._side = side_stream(device)

    def ops(self, tiles: Tiles, launch: Launch = run_kernel) -> TritonOps:
        """The op with these tiles, for this step."""
        segments = self.routing.device_segments
        ops = TritonOps(
            padded_rows={segments.block_rows: segments.grid * segments.block_rows},
            max_rank=self.copies.rank,
            device=self.copies.device,
            chooser=FixedTiles(tiles),
            launch=launch,
        )
        ops.begin_step(self.copies.rank, few=self._few)
        return ops

    def compile(self, tiles: Tiles) -> None:
        """Have the kernels made that ``beside`` will run, and those of the form for DoRA."""
        copies, ops = self.copies, self.ops(tiles, compile_kernel)
        self._add(ops, 0)
        ops.lora_add_(self._y, self._x, copies.sites[0], copies.arena, copies.tables, self.routing)

    def base(self, num_products: int) -> None:
        """The base's products alone."""
        for copy in self._turns(num_products):
            torch.mm(self._x, self.copies.weights[copy].t(), out=self._y)

    def beside(self, ops: TritonOps, num_products: int) -> None:
        """The same with the delta of each on a second stream. The consumer's addition is left out:
        the compiler puts it into a kernel that is there."""
        assert self._side is not None, "there is no second stream on a CPU"
        main = torch.cuda.current_stream(self.copies.device)
        for copy in self._turns(num_products):
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                self._add(ops, copy)
            torch.mm(self._x, self.copies.weights[copy].t(), out=self._y)
            main.wait_stream(self._side)

    def error(self, ops: TritonOps) -> float:
        """Of the first copy's delta, relative to the formula's."""
        self._delta.fill_(torch.nan)
        self._add(ops, 0)
        wanted = self._wanted.float()
        return float((self._delta.float() - wanted).norm() / wanted.norm())

    @cached_property
    def _wanted(self) -> Tensor:
        copies, wanted = self.copies, torch.zeros_like(self._y)
        ReferenceOps().lora_add_(
            wanted, self._x, copies.sites[0], copies.arena, copies.tables, self.routing
        )
        return wanted

    def _add(self, ops: TritonOps, copy: int) -> None:
        copies = self.copies
        ops.lora_delta_(
            self._delta, self._x, copies.sites[copy], copies.arena, copies.tables, self.routing
        )

    def _turns(self, num_products: int) -> Iterable[int]:
        return (product % len(self.copies.sites) for product in range(num_products))


class Timer:
    """Implements ``ops.tile_search.TileTimer`` in one step."""

    def __init__(self, copies: SiteCopies, num_rows: int, *, few: bool) -> None:
        self._step = Step(copies, num_rows, 1 if few else copies.num_slots)
        self._prepared: set[Tiles] = set()
        wanted = _PRODUCTS // (1 if num_rows < LONG_FROM else 4)
        self._num_products = max(wanted, len(copies.sites))
        self._stream = torch.cuda.Stream(copies.device)
        self._base = self._capture(lambda: self._step.base(self._num_products))

    def prepare(self, candidates: Sequence[Tiles]) -> None:
        """Compile them, as many at a time as there are processors."""
        new = [tiles for tiles in candidates if tiles not in self._prepared]
        self._prepared.update(new)
        # What does not compile fails again when those tiles are measured.
        with compiled_at_once(ignore_errors=True):
            for tiles in new:
                self._step.compile(tiles)

    def measure(self, tiles: Tiles) -> float | None:
        """Microseconds added to one product; None where the GPU has no room for the tiles or the
        compiler fails on them, in this form or in the one for DoRA."""
        step, ops = self._step, self._step.ops(tiles)
        try:
            step.compile(tiles)
        except (PTXASError, RuntimeError):  # RuntimeError: one of the compiler's passes failed
            return None
        try:
            # By now the kernels must be loaded, which is not possible within a capture.
            error = step.error(ops)
            whole = self._capture(lambda: step.beside(ops, self._num_products))
        except OutOfResources:
            return None
        assert error < _MAX_ERROR, f"{tiles} are wrong by {error:.1e}"
        return round(added_microseconds(whole, self._base) / self._num_products, 2)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        rehearse(run, self._stream)
        return capture(run, self._stream)
