"""Tile sizes of the experts' kernels, by the size of the step."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.ops.tiles import MAX_RANK_BLOCK, Tiles

_LEAST_ROWS, _MOST_ROWS = 16, 128
"""Of a piece of one expert. The least is what a matrix unit takes."""
_RUN_ROWS = 16
"""Of a piece of one expert and slot, of which many have a row or two."""
_LONG_RUN_ROWS = 64
_BLOCK_K = 128


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Of the base's product."""

    block_rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def product_tiles(num_pairs: int, num_experts: int, element_size: int) -> ProductTiles:
    """Few rows for each expert: as many loads of weights under way as there can be. Many: weights
    are used for more rows at a time.

    They must not hang on anything else, or the base's rows would change their bits.
    """
    rows = _LEAST_ROWS
    while rows < _MOST_ROWS and rows * num_experts < num_pairs:
        rows *= 2
    if rows <= 32:
        return ProductTiles(rows, 64, 256 // element_size, warps=4, stages=4)
    return ProductTiles(rows, 128, 128 // element_size, warps=8 if rows > 64 else 4, stages=3)


def run_rows(num_pairs: int, num_experts: int, *, few: bool) -> int:
    """Rows of a piece of one expert and slot."""
    return _LONG_RUN_ROWS if few and num_pairs >= _LONG_RUN_ROWS * num_experts else _RUN_ROWS


def expert_lora_tiles(in_features: int, num_pairs: int, rank_bucket: int, block_rows: int) -> Tiles:
    """K is split where the runs, of which there are at most as many as pairs, are few."""
    ranks = min(rank_bucket, MAX_RANK_BLOCK)
    wanted = 8 if num_pairs <= 32 else 4 if num_pairs <= 128 else 1
    split_k = min(wanted, -(-in_features // _BLOCK_K))
    stages = 2 if block_rows > _RUN_ROWS and ranks > 16 else 3
    return Tiles(split_k, _BLOCK_K, ranks, shrink_stages=stages, expand_ranks=ranks, block_n=128)


def num_pieces(num_pairs: int, num_runs: int, rows: int) -> int:
    """Most pieces of at most so many rows into which at most ``num_runs`` runs can be cut."""
    return min(num_pairs, num_runs + num_pairs // rows)
