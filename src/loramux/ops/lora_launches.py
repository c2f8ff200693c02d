"""Launches of the two LoRA kernels over pieces of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.ops.compile_ahead import compiled_ahead
from loramux.ops.interface import DeviceSegments
from loramux.ops.layout import ALIGN_BYTES, pad
from loramux.ops.tiles import LEAST_SHARED, MAX_SLICES, Tiles, rank_buckets
from loramux.ops.triton_kernels import expand_kernel, shrink_kernel

INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)
# Launch options are no parameters of the kernels, so a type checker cannot know them.
_shrink: Any = shrink_kernel
_expand: Any = expand_kernel

Launch = Callable[..., None]
"""Takes a kernel, its grid, its arguments and its options."""


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """What a launch does."""
    kernel[grid](*arguments, **options)


def compile_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Instead of a launch: have the kernel compiled that it would run."""
    kernel.warmup(*arguments, grid=grid, **options)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """For what runs beside a product. It goes first where both wait for a place: it is short, and
    what follows the product waits for it."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return LEAST_SHARED
    index = torch.cuda.current_device() if device.index is None else device.index
    driver: Any = triton.runtime.driver.active
    return driver.utils.get_device_properties(index)["max_shared_mem"]


class StepLaunches:
    """What all launches of a step have in common."""

    def __init__(self, device: torch.device, max_rank: int, run: Launch = run_kernel) -> None:
        self.run = run
        self.rank_buckets = rank_buckets(max_rank)
        self.rank_bucket = self.rank_buckets[-1]
        """Of the step's adapters."""
        self.few = False
        """Whether these are few."""
        self.shared_bytes = _shared_bytes(device)
        """Shared memory that a block may have."""
        # Made here, so that every capture forks to the same stream.
        self._side = side_stream(device)

    def begin_step(self, max_rank: int, *, few: bool) -> None:
        self.rank_bucket, self.few = self.bucket_of(max_rank), few

    def bucket_of(self, max_rank: int) -> int:
        """The smallest rank bucket that holds a rank."""
        return next(bucket for bucket in self.rank_buckets if bucket >= max_rank)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is launched inside does not run: its kernels are compiled, many at a time."""
        run, self.run = self.run, compile_kernel
        try:
            with compiled_ahead():
                yield
        finally:
            self.run = run

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is launched inside runs on a second stream; ``join`` waits for it."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Have the current stream wait for what runs aside. Something must: a stream that is being
        captured may not wait for one that is not."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What products of a dtype are computed in; the interpreter knows none in bfloat16."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not INTERPRETED else tl.float32


def unit_of(arena: Tensor) -> int:
    """Elements of a unit in which offsets count."""
    return ALIGN_BYTES // arena.element_size()


@dataclass(frozen=True)
class Pieces:
    """The rows that a launch works on, cut into segments."""

    segments: DeviceSegments
    sorted_rows: Tensor
    """Rows of x and y in the order that the segments count in."""

    @property
    def plane_rows(self) -> int:
        """Rows of a plane: every segment has room for all that it could have."""
        return self.segments.grid * self.segments.block_rows


def plane_elements(tiles: Tiles, num_slices: int, pieces: Pieces, ranks: int) -> int:
    """Elements of the workspace between the kernels."""
    return tiles.split_k * num_slices * pieces.plane_rows * ranks


def launch_shrink(
    run: Launch,
    x: Tensor,
    planes: Tensor,
    arena: Tensor,
    table: Tensor,
    pieces: Pieces,
    ranks: int,
    tiles: Tiles,
) -> None:
    """x ``[rows, in]``; table: the slices' rows of the slot tables; ``ranks``: the rank bucket."""
    segments, in_features, num_slices = pieces.segments, x.shape[1], table.shape[0]
    run(
        _shrink,
        (segments.grid, num_slices * triton.cdiv(ranks, tiles.shrink_ranks), tiles.split_k),
        x,
        planes,
        arena,
        table,
        segments.slot,
        segments.start,
        segments.rows,
        pieces.sorted_rows,
        x.stride(0),
        table.stride(0),
        pieces.plane_rows,
        ranks,
        K=in_features,
        K_PAD=pad(in_features),
        NUM_SLICES=num_slices,
        UNIT=unit_of(arena),
        SPLIT_K=tiles.split_k,
        BLOCK_M=segments.block_rows,
        BLOCK_R=tiles.shrink_ranks,
        BLOCK_K=tiles.block_k,
        DOT=dot_type(arena.dtype),
        PRECISION="ieee",
        num_warps=tiles.shrink_warps,
        num_stages=tiles.shrink_stages,
    )


def launch_expand(
    run: Launch,
    y: Tensor,
    planes: Tensor,
    arena: Tensor,
    table: Tensor,
    sizes: Sequence[int],
    bias: Tensor | None,
    pieces: Pieces,
    ranks: int,
    tiles: Tiles,
    *,
    beside: bool,
) -> None:
    """y ``[rows, out]``, in which the slices, of these sizes, stand one after another."""
    segments = pieces.segments
    n0, n1, n2 = (*sizes, *[0] * (MAX_SLICES - len(sizes)))
    group = tiles.block_n * tiles.expand_tiles
    run(
        _expand,
        (segments.grid, sum(triton.cdiv(size, group) for size in sizes)),
        y,
        planes,
        arena,
        table,
        y if bias is None else bias,
        segments.slot,
        segments.start,
        segments.rows,
        pieces.sorted_rows,
        y.stride(0),
        table.stride(0),
        pieces.plane_rows,
        ranks,
        N0=n0,
        N1=n1,
        N2=n2,
        NUM_SLICES=len(sizes),
        UNIT=unit_of(arena),
        SPLIT_K=tiles.split_k,
        BLOCK_M=segments.block_rows,
        BLOCK_N=tiles.block_n,
        BLOCK_R=tiles.expand_ranks,
        ONE_BLOCK=ranks <= tiles.expand_ranks,
        TILES=tiles.expand_tiles,
        HAS_BIAS=bias is not None,
        BESIDE=beside,
        DOT=dot_type(arena.dtype),
        PRECISION="ieee",
        num_warps=tiles.expand_warps,
        num_stages=tiles.expand_stages,
    )
