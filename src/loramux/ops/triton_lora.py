"""The LoRA op on CUDA: launches of the Triton kernels, and the workspace between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from loramux.ops.interface import Routing, Site, SlotTables
from loramux.ops.layout import ALIGN_BYTES, pad
from loramux.ops.opaque import register_lora
from loramux.ops.tiles import MAX_SLICES, DefaultTiles, TileChooser, launches_of, rank_buckets
from loramux.ops.triton_kernels import expand_kernel, shrink_kernel

_INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)
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


class TritonOps:
    """Implements ``ops.interface.LoraOps`` with two launches for each site of up to three slices.

    Grids depend on the step's bucket and on whether its adapters are few, and nothing is allocated,
    so launches can be captured in a CUDA graph and replayed for other adapters, few or many as the
    captured ones, of the same rank bucket.
    """

    name = "triton"

    def __init__(
        self,
        *,
        padded_rows: Mapping[int, int],
        max_rank: int,
        device: torch.device,
        chooser: TileChooser | None = None,
        launch: Launch = run_kernel,
    ) -> None:
        """``padded_rows``: for each length of segments, the most rows that those of a step have
        together when each counts as full. Ranks are at most ``max_rank``.
        """
        self._chooser = chooser or DefaultTiles()
        self._run = launch
        self.rank_buckets = rank_buckets(max_rank)
        self._rank_bucket = self.rank_buckets[-1]
        self._few = False
        self._context: tuple[Tensor, Routing] | None = None
        # Made here, so that every capture forks to the same stream.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.number = register_lora(self)
        size = max(
            self._chooser.max_split_k(block_rows, bucket) * MAX_SLICES * rows * bucket
            for block_rows, rows in padded_rows.items()
            for bucket in self.rank_buckets
        )
        self._planes = torch.empty(size, dtype=torch.float32, device=device)

    @property
    def workspace_bytes(self) -> int:
        return self._planes.nbytes

    def bind(self, arena: Tensor, routing: Routing) -> None:
        """What the ops inside compiled layers read beside their arguments."""
        self._context = (arena, routing)

    def begin_step(self, max_rank: int, *, few: bool) -> None:
        """Say how large the ranks of the step's adapters are, and whether these are few."""
        self._rank_bucket = self.bucket_of(max_rank)
        self._few = few

    def bucket_of(self, max_rank: int) -> int:
        """The smallest rank bucket that holds a rank."""
        return next(bucket for bucket in self.rank_buckets if bucket >= max_rank)

    def lora_add_(
        self, y: Tensor, x: Tensor, site: Site, arena: Tensor, tables: SlotTables, routing: Routing
    ) -> None:
        table, sizes = _table_of(site, tables), [part.size for part in site.slices]
        self._launch(y, x, table, sizes, site.bias, arena, routing, beside=False)

    def lora_delta_(
        self,
        delta: Tensor,
        x: Tensor,
        site: Site,
        arena: Tensor,
        tables: SlotTables,
        routing: Routing,
    ) -> None:
        """Semantics: delta[t] = B (A x[t]), and -0.0 where a row's slot has no weights.

        delta ``[T, out]``. Adding -0.0 leaves every bit as it was. Not for DoRA.
        """
        table, sizes = _table_of(site, tables), [part.size for part in site.slices]
        self._launch(delta, x, table, sizes, None, arena, routing, beside=True)

    def linear_beside(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The base's product and, on a second stream at the same time, the delta.

        weight ``[out, in]``; table: the site's rows of the slot tables. The delta is whole when
        this returns, as far as the current stream is concerned.
        """
        assert self._context is not None
        arena, routing = self._context
        delta = x.new_empty(x.shape[0], weight.shape[0])
        if self._side is None:
            self._launch(delta, x, table, sizes, None, arena, routing, beside=True)
            return F.linear(x, weight, bias), delta
        main = torch.cuda.current_stream(x.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._launch(delta, x, table, sizes, None, arena, routing, beside=True)
        y = F.linear(x, weight, bias)
        main.wait_stream(self._side)
        return y, delta

    def linear_in_place(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int]
    ) -> Tensor:
        """The base's product, then LoRA on top of it; this form knows DoRA."""
        assert self._context is not None
        arena, routing = self._context
        y = F.linear(x, weight, bias)
        self._launch(y, x, table, sizes, bias, arena, routing, beside=False)
        return y

    def _launch(
        self,
        y: Tensor,
        x: Tensor,
        table: Tensor,
        sizes: list[int],
        bias: Tensor | None,
        arena: Tensor,
        routing: Routing,
        *,
        beside: bool,
    ) -> None:
        first = column = 0
        for part in launches_of(sizes):
            self._launch_slices(
                y[:, column:],
                x,
                table[first : first + len(part)],
                part,
                None if bias is None else bias[column:],
                arena,
                routing,
                beside=beside,
            )
            first += len(part)
            column += sum(part)

    def _launch_slices(
        self,
        y: Tensor,
        x: Tensor,
        table: Tensor,
        sizes: tuple[int, ...],
        bias: Tensor | None,
        arena: Tensor,
        routing: Routing,
        *,
        beside: bool,
    ) -> None:
        """Up to ``MAX_SLICES`` slices, by one launch of each kernel."""
        segments = routing.device_segments
        in_features, ranks = x.shape[1], self._rank_bucket
        tiles = self._chooser.choose(in_features, sizes, x.shape[0], ranks, self._few)
        plane_rows = segments.grid * segments.block_rows
        planes = tiles.split_k * len(sizes) * plane_rows * ranks
        assert planes <= self._planes.numel(), "the workspace is sized for the largest step"
        unit = ALIGN_BYTES // arena.element_size()
        dot = tl.bfloat16 if arena.dtype == torch.bfloat16 and not _INTERPRETED else tl.float32
        self._run(
            _shrink,
            (segments.grid, len(sizes) * triton.cdiv(ranks, tiles.shrink_ranks), tiles.split_k),
            x,
            self._planes,
            arena,
            table,
            segments.slot,
            segments.start,
            segments.rows,
            routing.sorted_rows,
            x.stride(0),
            table.stride(0),
            plane_rows,
            ranks,
            K=in_features,
            K_PAD=pad(in_features),
            NUM_SLICES=len(sizes),
            UNIT=unit,
            SPLIT_K=tiles.split_k,
            BLOCK_M=segments.block_rows,
            BLOCK_R=tiles.shrink_ranks,
            BLOCK_K=tiles.block_k,
            DOT=dot,
            PRECISION="ieee",
            num_warps=tiles.shrink_warps,
            num_stages=tiles.shrink_stages,
        )
        n0, n1, n2 = sizes + (0,) * (MAX_SLICES - len(sizes))
        group = tiles.block_n * tiles.expand_tiles
        self._run(
            _expand,
            (segments.grid, sum(triton.cdiv(size, group) for size in sizes)),
            y,
            self._planes,
            arena,
            table,
            y if bias is None else bias,
            segments.slot,
            segments.start,
            segments.rows,
            routing.sorted_rows,
            y.stride(0),
            table.stride(0),
            plane_rows,
            ranks,
            N0=n0,
            N1=n1,
            N2=n2,
            NUM_SLICES=len(sizes),
            UNIT=unit,
            SPLIT_K=tiles.split_k,
            BLOCK_M=segments.block_rows,
            BLOCK_N=tiles.block_n,
            BLOCK_R=tiles.expand_ranks,
            ONE_BLOCK=ranks <= tiles.expand_ranks,
            TILES=tiles.expand_tiles,
            HAS_BIAS=bias is not None,
            BESIDE=beside,
            DOT=dot,
            PRECISION="ieee",
            num_warps=tiles.expand_warps,
            num_stages=tiles.expand_stages,
        )


def _table_of(site: Site, tables: SlotTables) -> Tensor:
    first = site.slices[0].module
    return tables.table[first : first + len(site.slices)]
