"""Measures tiles on the GPU that is here, the way a captured step of compiled layers uses them.

For each shape there are several copies of the base's weight and of all adapters, so many that
nothing of a copy is in the cache when its turn comes again. A CUDA graph of base products with the
LoRA op beside them is compared with one of the products alone. Few adapters are measured with one,
many with as many as there are slots, row after row another.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from loramux.config import ModelOptions
from loramux.errors import ConfigError
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.weights import Placement
from loramux.model.anatomy import Anatomy, examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import load_base
from loramux.ops.interface import Site, Slice
from loramux.ops.layout import ALIGN_BYTES, pad
from loramux.ops.reference import ReferenceOps
from loramux.ops.tile_search import Found, TileTimer, grid_of, search
from loramux.ops.tiles import (
    FEW_ADAPTERS,
    LONG_FROM,
    FixedTiles,
    Tiles,
    block_rows_of,
    choose_tiles,
    launches_of,
    rank_bucket_of,
)
from loramux.ops.triton_lora import Launch, TritonOps, compile_kernel, run_kernel
from loramux.ops.tuning import RANK_BUCKETS, ROW_BUCKETS, Entry, Key, Shape, Table, bucket_of
from loramux.types import Slot

SHAPES = {
    "llama-1b": [(2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))],
    "llama-8b": [
        (4096, (4096, 1024, 1024)),
        (4096, (4096,)),
        (4096, (14336, 14336)),
        (14336, (4096,)),
    ],
    "llama-70b": [
        (8192, (8192, 1024, 1024)),
        (8192, (8192,)),
        (8192, (28672, 28672)),
        (28672, (8192,)),
    ],
}
"""Sites of well-known models, by name: what a base of that shape would be examined for."""

MEASURED_ROWS = {
    "up to 16": 16,
    "up to 64": 64,
    "up to 128": 128,
    "up to 1023": 512,
    "from 1024": 2048,
}
"""Rows of the step that stands for each bucket."""

_CACHE_ROUNDS = 4
"""Bytes of base weights between two uses of a copy, in sizes of the GPU's cache."""
_PRODUCTS = 24
"""Base products in one graph, at least; a quarter of it in long steps."""
_REPLAYS = 9
_WARM_UP_SECONDS = 0.02
"""The GPU's clocks fall while the host compiles."""
_MAX_ERROR = 2e-2
"""Of a delta, relative to its size; bfloat16 rounds twice on the way."""

Report = Callable[[Entry, float | None], None]
"""Hears of each entry as it is found, with the time of the rule's tiles. Times are None where the
GPU has no room."""


@dataclass(frozen=True)
class Cases:
    """What tiles are searched for: all shapes with all ranks, in all buckets of rows."""

    shapes: Sequence[Shape]
    ranks: Sequence[int]
    rows: Sequence[int]
    """Any that lie in the buckets."""
    num_slots: int

    @property
    def steps(self) -> list[tuple[str, bool]]:
        """Buckets of rows, each with few adapters, and with many if there can be."""
        wanted = {bucket_of(ROW_BUCKETS, num_rows) for num_rows in self.rows}
        mixes = (True, False) if self.num_slots > FEW_ADAPTERS else (True,)
        return [(name, few) for name in MEASURED_ROWS if name in wanted for few in mixes]


def tune(cases: Cases, report: Report) -> Iterator[Table]:
    """Search tiles; what was found for one shape and rank after the other. Raises ConfigError."""
    device, ranks = require_gpu(), cases.ranks
    if len({_rank_name(rank) for rank in ranks}) < len(ranks):
        raise ConfigError(
            f"of the ranks {', '.join(map(str, ranks))} some share tiles: name one each of "
            + ", ".join(RANK_BUCKETS)
        )
    found = Table(
        gpu=gpu_name(),
        date=date.today().isoformat(),
        versions={"torch": torch.__version__, "triton": triton.__version__},
        entries=(),
    )
    for shape, rank in itertools.product(cases.shapes, ranks):
        num_copies = copies_for(shape, torch.cuda.get_device_properties(device).L2_cache_size)
        copies = SiteCopies(shape, rank, cases.num_slots, num_copies, device)
        entries = [_tune_step(copies, rows, few, report) for rows, few in cases.steps]
        yield replace(found, entries=tuple(e for e in entries if e.measured is not None))


def _tune_step(copies: SiteCopies, rows: str, few: bool, report: Report) -> Entry:
    """One kind of step over a site."""
    key = Key(copies.shape, rows, _rank_name(copies.rank), few)
    num_rows = MEASURED_ROWS[rows]
    found = find_tiles(key, copies.rank, Timer(copies, num_rows, few=few))
    entry = Entry(key, found.tiles, found.measured)
    report(entry, found.start)
    return entry


def _rank_name(rank: int) -> str:
    """The bucket that adapters of one rank run in, by the name that a table gives it."""
    return bucket_of(RANK_BUCKETS, rank_bucket_of(rank))


def find_tiles(key: Key, rank: int, timer: TileTimer) -> Found:
    """Search from the default rule's tiles."""
    block_rows = block_rows_of(MEASURED_ROWS[key.rows], key.few)
    rank_bucket = rank_bucket_of(rank)
    start = choose_tiles(key.shape.in_features, block_rows, rank_bucket, few=key.few)
    return search(start, grid_of(block_rows, rank_bucket), timer)


def gpu_name() -> str:
    """What a table calls the GPU that is here. Raises ConfigError where there is none."""
    return torch.cuda.get_device_name(require_gpu())


def require_gpu() -> torch.device:
    """Raises ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "tuning measures on an NVIDIA GPU and there is none: run it on the machine that will "
            "serve, with torch's CUDA build"
        )
    return torch.device("cuda", torch.cuda.current_device())


def shapes_named(name: str) -> list[Shape]:
    """The sites of a well-known model. Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"the shape {name!r} is unknown: use one of {', '.join(SHAPES)}, or BASE")
    return [Shape(in_features, sizes) for in_features, sizes in SHAPES[name]]


def shapes_of_base(path: str) -> list[Shape]:
    """The distinct sites of a base model, which is in memory only meanwhile. Raises as load_base
    and examine do."""
    base = load_base(path, ModelOptions(dtype="bfloat16"))
    shapes = shapes_of(examine(base, AttentionSeam(base.model)))
    del base
    gc.collect()
    torch.cuda.empty_cache()
    return shapes


def shapes_of(anatomy: Anatomy) -> list[Shape]:
    """The distinct launches of a model's sites, in the order in which they first come."""
    modules = anatomy.modules.shapes
    return list(
        dict.fromkeys(
            Shape(modules[members[0]].in_features, sizes)
            for members in anatomy.sites
            for sizes in launches_of([modules[member].out_features for member in members])
        )
    )


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
        end = 0
        for slot in range(self.num_slots):
            start, placements = end, list[Placement]()
            for part in itertools.chain(*(site.slices for site in self.sites)):
                offset_a = end - start
                offset_b = offset_a + self.rank * pad(self.shape.in_features)
                end = start + offset_b + part.size * pad(self.rank)
                placements.append(
                    Placement(part.module, self.rank, offset_a // unit, offset_b // unit)
                )
            self.tables.set(Slot(slot), placements, start // unit)
        self.tables.flush()
        return end


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
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

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
        """Have the kernels made that ``beside`` will run."""
        self._add(self.ops(tiles, compile_kernel), 0)

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
    """Implements ``ops.tile_search.TileTimer`` in one step; the base's products alone are timed
    once."""

    def __init__(self, copies: SiteCopies, num_rows: int, *, few: bool) -> None:
        self._step = Step(copies, num_rows, 1 if few else copies.num_slots)
        self._prepared: set[Tiles] = set()
        wanted = _PRODUCTS // (1 if num_rows < LONG_FROM else 4)
        self._num_products = max(wanted, len(copies.sites))
        self._stream = torch.cuda.Stream(copies.device)
        graph = self._capture(lambda: self._step.base(self._num_products))
        self._base = _replay_microseconds(graph)

    def prepare(self, candidates: Sequence[Tiles]) -> None:
        """Compile them, as many at a time as there are processors."""
        new = [tiles for tiles in candidates if tiles not in self._prepared]
        self._prepared.update(new)
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            suppress(PTXASError),  # which comes again when those tiles are measured
            triton.AsyncCompileMode(pool),
        ):
            for tiles in new:
                self._step.compile(tiles)

    def measure(self, tiles: Tiles) -> float | None:
        """Microseconds added to one product; None where the GPU has no room for the tiles."""
        step, ops = self._step, self._step.ops(tiles)
        try:
            # By now the kernels must be loaded, which is not possible within a capture.
            error = step.error(ops)
            graph = self._capture(lambda: step.beside(ops, self._num_products))
        except (OutOfResources, PTXASError):
            return None
        assert error < _MAX_ERROR, f"{tiles} are wrong by {error:.1e}"
        return round((_replay_microseconds(graph) - self._base) / self._num_products, 2)

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """What ``run`` launches; it runs once before, for what is made at a first call."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not by torch.cuda.graph, which collects garbage each time: that takes longer than this.
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            run()
            graph.capture_end()
        return graph


def _replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """The median of some replays."""
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)
