"""Tile sizes of the Triton LoRA kernels, what they depend on, and the rule where no table helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from loramux.ops.layout import pad

FEW_ADAPTERS = 4
"""Distinct adapters in a step that are few, at most. Few have long runs of rows, many have short
ones: other launches are best for them, and both kinds of batch are usual."""

SHORT_ROWS = 16
"""Rows of a short segment: the least that a matrix unit takes."""
MIDDLE_ROWS = 32
"""Rows of a segment where few adapters have so many rows that shorter ones would only be more."""
MIDDLE_FROM = 128
"""Rows of a step of few adapters from which on segments are of middle length."""
LONG_ROWS = 64
"""Rows of a long segment, which re-reads weights less in a prefill."""
LONG_FROM = 1024
"""Rows of a step from which on segments are long."""

MAX_SLICES = 3
"""Slices of one launch; a site with more takes several."""
LEAST_SHARED = 99 * 1024
"""Bytes of shared memory of a block where it is least (an L4, an RTX 4090)."""
MAX_RANK_BLOCK = 64
"""Ranks that one block of either kernel takes at most."""
_SMALL_RANK = 16
_MANY = 1 << 20
"""Input features that are split as much as any."""


def block_rows_of(num_rows: int, few: bool) -> int:
    """Rows of a segment in a step of this many rows, of few adapters or of many."""
    if num_rows >= LONG_FROM:
        return LONG_ROWS
    return MIDDLE_ROWS if few and num_rows >= MIDDLE_FROM else SHORT_ROWS


def rank_buckets(max_rank: int) -> tuple[int, ...]:
    """Ranks that launches are made for; each is a whole number of blocks of ranks."""
    largest = -(-max_rank // MAX_RANK_BLOCK) * MAX_RANK_BLOCK
    return (*(b for b in (_SMALL_RANK, MAX_RANK_BLOCK) if b < largest), largest)


def rank_bucket_of(rank: int) -> int:
    """The rank bucket that serves adapters of one rank."""
    return next(bucket for bucket in rank_buckets(rank) if bucket >= rank)


def launches_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The slices of a site, cut into those of one launch each."""
    return [tuple(sizes[i : i + MAX_SLICES]) for i in range(0, len(sizes), MAX_SLICES)]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of one site at one batch size; see docs/performance.md for how they were found."""

    split_k: int
    block_k: int = 128
    shrink_ranks: int = 16
    """Divides the rank bucket."""
    shrink_warps: int = 4
    shrink_stages: int = 3
    block_n: int = 256
    expand_ranks: int = 16
    """Divides ``shrink_ranks``."""
    expand_warps: int = 4
    expand_stages: int = 1
    """With ranks above ``expand_ranks`` more would put every plane into shared memory twice."""
    expand_tiles: int = 1
    """Tiles of columns that one block works through."""


class TileChooser(Protocol):
    """Chooses the tiles of each launch. Captured graphs keep what was chosen."""

    def choose(
        self, in_features: int, sizes: Sequence[int], rows: int, rank_bucket: int, few: bool
    ) -> Tiles:
        """Tiles of a launch over slices of these sizes in a step of so many rows, of few adapters
        or of many."""
        ...

    def max_split_k(self, block_rows: int, rank_bucket: int) -> int:
        """The most splits that ``choose`` returns in steps whose segments have so many rows."""
        ...


def choose_tiles(in_features: int, block_rows: int, rank_bucket: int, *, few: bool) -> Tiles:
    """The rule of thumb: fits every GPU that computes in bfloat16, in float32 as well.

    K is split where few segments would leave the GPU idle; long ones fill it by themselves. Each
    split is a plane that expand reads again for every column tile, so large ranks take fewer.
    Many adapters make many segments of few rows, so each block works through several tiles of
    columns: it finds out once what its segment is.
    """
    ranks = min(rank_bucket, MAX_RANK_BLOCK)
    if block_rows == LONG_ROWS:
        # Three stages of 64 ranks in float32 are 128 KB of shared memory; small GPUs have 99.
        stages = 3 if rank_bucket <= _SMALL_RANK else 2
        return Tiles(
            split_k=1, shrink_ranks=ranks, shrink_stages=stages, expand_ranks=ranks, block_n=128
        )
    wanted = 8 if rank_bucket <= _SMALL_RANK and block_rows == SHORT_ROWS else 4
    if in_features > 8192:
        wanted *= 2
    blocks = -(-pad(in_features) // 128)
    tiles = Tiles(split_k=min(wanted, blocks), shrink_ranks=ranks, expand_ranks=ranks)
    if few or rank_bucket > ranks:
        return tiles
    # Two stages of 64 ranks and 256 columns in float32 would be 128 KB.
    block_n = 256 if rank_bucket <= _SMALL_RANK else 128
    return replace(tiles, expand_tiles=2, expand_stages=2, block_n=block_n)


@dataclass(frozen=True, slots=True)
class DefaultTiles:
    """Chooses by ``choose_tiles`` alone."""

    def choose(
        self, in_features: int, sizes: Sequence[int], rows: int, rank_bucket: int, few: bool
    ) -> Tiles:
        return choose_tiles(in_features, block_rows_of(rows, few), rank_bucket, few=few)

    def max_split_k(self, block_rows: int, rank_bucket: int) -> int:
        return max(
            choose_tiles(_MANY, block_rows, rank_bucket, few=few).split_k for few in (False, True)
        )


@dataclass(frozen=True, slots=True)
class FixedTiles:
    """The same tiles for every launch: to measure and to test them."""

    tiles: Tiles

    def choose(
        self, in_features: int, sizes: Sequence[int], rows: int, rank_bucket: int, few: bool
    ) -> Tiles:
        return self.tiles

    def max_split_k(self, block_rows: int, rank_bucket: int) -> int:
        return self.tiles.split_k
