"""The LoRA op on CUDA: launches of the Triton kernels, and the workspace between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loramux.ops.interface import DeviceSegments, Routing, Site, Slice, SlotTables
from loramux.ops.layout import ALIGN_BYTES, pad
from loramux.ops.triton_kernels import expand_kernel, shrink_kernel

_MAX_SLICES = 3
"""Slices of one launch; a site with more takes several."""
_MAX_SPLITS = 16
_MAX_RANK_BLOCK = 64
"""Ranks that one block of either kernel takes at most."""
_INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)
# Launch options are no parameters of the kernels, so a type checker cannot know them.
_shrink: Any = shrink_kernel
_expand: Any = expand_kernel


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one site at one batch size; see docs/performance.md for how they were found."""

    split_k: int
    block_k: int = 128
    shrink_ranks: int = 16
    shrink_warps: int = 4
    shrink_stages: int = 3
    block_n: int = 256
    expand_ranks: int = 16
    """Divides ``shrink_ranks``."""
    expand_warps: int = 4
    expand_stages: int = 1
    """More would put every plane into shared memory several times."""


ChooseTiles = Callable[[int, DeviceSegments, int], Tiles]
"""Tiles of a site with so many input features, for a step's segments and the largest rank."""


class TritonOps:
    """Implements ``ops.interface.LoraOps`` with two launches for each site of up to three slices.

    Grids depend on the step's bucket only and nothing is allocated, so launches can be captured in
    a CUDA graph and replayed for other adapters. The workspace is for segments that have up to
    ``max_padded_rows`` rows together and ranks up to ``max_rank``, which must be raised
    (``reserve``) before an adapter of a larger rank is placed.
    """

    name = "triton"

    def __init__(
        self,
        *,
        max_padded_rows: int,
        max_rank: int,
        device: torch.device,
        choose: ChooseTiles | None = None,
    ) -> None:
        self._choose = choose or choose_tiles
        self._device = device
        self._max_rows = max_padded_rows
        self._planes = torch.empty(0, dtype=torch.float32, device=device)
        self.max_rank = 0
        self.reserve(max_rank)

    def reserve(self, max_rank: int) -> None:
        """Make room for ranks up to ``max_rank``; what was captured must be captured anew."""
        if max_rank <= self.max_rank:
            return
        # Whole blocks of ranks: shrink fills the last one with zeros.
        self.max_rank = -(-max_rank // _MAX_RANK_BLOCK) * _MAX_RANK_BLOCK if max_rank > 16 else 16
        size = _MAX_SPLITS * _MAX_SLICES * self._max_rows * self.max_rank
        self._planes = torch.empty(size, dtype=torch.float32, device=self._device)

    def lora_add_(
        self, y: Tensor, x: Tensor, site: Site, arena: Tensor, tables: SlotTables, routing: Routing
    ) -> None:
        for slices in _launches(site.slices):
            self._launch(y, x, site, slices, arena, tables, routing, beside=False)

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
        for slices in _launches(site.slices):
            self._launch(delta, x, site, slices, arena, tables, routing, beside=True)

    def _launch(
        self,
        y: Tensor,
        x: Tensor,
        site: Site,
        slices: tuple[Slice, ...],
        arena: Tensor,
        tables: SlotTables,
        routing: Routing,
        *,
        beside: bool,
    ) -> None:
        segments = routing.device_segments
        tiles = self._choose(site.in_features, segments, self.max_rank)
        first, column = slices[0].module, slices[0].start
        rows = slice(first, first + len(slices))
        y_part = y[:, column:]
        sizes = [part.size for part in slices] + [0] * (_MAX_SLICES - len(slices))
        plane_rows = segments.grid * segments.block_rows
        assert plane_rows <= self._max_rows, "the workspace is sized for the largest bucket"
        unit = ALIGN_BYTES // arena.element_size()
        dot = tl.bfloat16 if arena.dtype == torch.bfloat16 and not _INTERPRETED else tl.float32
        num_rank_blocks = triton.cdiv(self.max_rank, tiles.shrink_ranks)
        _shrink[(segments.grid, len(slices) * num_rank_blocks, tiles.split_k)](
            x,
            self._planes,
            arena,
            tables.offset_a[rows],
            tables.rank[rows],
            segments.slot,
            segments.start,
            segments.rows,
            routing.sorted_rows,
            x.stride(0),
            tables.rank.stride(0),
            plane_rows,
            self.max_rank,
            K=site.in_features,
            K_PAD=pad(site.in_features),
            NUM_SLICES=len(slices),
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
        num_tiles = sum(triton.cdiv(size, tiles.block_n) for size in sizes)
        bias = None if site.bias is None else site.bias[column:]
        _expand[(segments.grid, num_tiles)](
            y_part,
            self._planes,
            arena,
            tables.offset_b[rows],
            tables.offset_g[rows],
            tables.has_gain[rows],
            tables.rank[rows],
            y_part if bias is None else bias,
            segments.slot,
            segments.start,
            segments.rows,
            routing.sorted_rows,
            y.stride(0),
            tables.rank.stride(0),
            plane_rows,
            self.max_rank,
            N0=sizes[0],
            N1=sizes[1],
            N2=sizes[2],
            NUM_SLICES=len(slices),
            UNIT=unit,
            SPLIT_K=tiles.split_k,
            BLOCK_M=segments.block_rows,
            BLOCK_N=tiles.block_n,
            BLOCK_R=tiles.expand_ranks,
            HAS_BIAS=bias is not None,
            BESIDE=beside,
            DOT=dot,
            PRECISION="ieee",
            num_warps=tiles.expand_warps,
            num_stages=tiles.expand_stages,
        )


def choose_tiles(in_features: int, segments: DeviceSegments, max_rank: int) -> Tiles:
    """What was fastest on an H200; docs/performance.md has the figures.

    K is split where few segments would leave the GPU idle; long ones fill it by themselves. Each
    split is a plane that expand reads again for every column tile, so large ranks take fewer.
    """
    ranks = 16 if max_rank <= 16 else _MAX_RANK_BLOCK
    if segments.block_rows > 16:
        return Tiles(split_k=1, shrink_ranks=ranks, expand_ranks=ranks, block_n=128)
    wanted = 8 if max_rank <= 16 else 4
    if in_features > 8192:
        wanted *= 2
    blocks = triton.cdiv(pad(in_features), 128)
    return Tiles(split_k=min(wanted, blocks), shrink_ranks=ranks, expand_ranks=ranks)


def _launches(slices: tuple[Slice, ...]) -> list[tuple[Slice, ...]]:
    """Runs of up to three slices whose modules and columns follow one another."""
    runs: list[tuple[Slice, ...]] = []
    for part in slices:
        last = runs[-1] if runs else ()
        follows = (
            last
            and len(last) < _MAX_SLICES
            and part.module == last[-1].module + 1
            and part.start == last[-1].start + last[-1].size
        )
        if follows:
            runs[-1] = (*last, part)
        else:
            runs.append((part,))
    return runs
