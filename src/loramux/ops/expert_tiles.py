"""Tile sizes of the experts' kernels, by the size of the step."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.ops.tiles import LEAST_SHARED, MAX_RANK_BLOCK, Tiles

_LEAST_ROWS, _MOST_ROWS = 16, 128
"""Of a piece of one expert. The least is what a matrix unit takes."""
_ROOM = 2
"""Rows of a piece, by those that an expert has on average: some have more, and a second piece asks
for the weights again."""
_RUN_ROWS = 16
"""Of a piece of one expert and slot, of which many have a row or two."""
_LONG_RUN_ROWS = 64
_BLOCK_K = 128
ALONE_PAIRS = 64
"""So few pairs are not sorted: hardly two have the same expert."""
PAIRS_PER_EXPERT_OF_FEW, PAIRS_PER_EXPERT_OF_MANY = 8, 16
"""Up to so many, deltas are added pair by pair; runs of few adapters are longer."""
BLOCK_RANKS = 16
"""Of B at a time, where deltas are added so."""
GATE_COLUMNS, COMBINE_COLUMNS = 128, 64
"""Of a program that adds them; the latter does so for all experts of a token."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """How many experts a layer has, and how many are chosen for a token."""

    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """Of the base's product."""

    block_rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def shared_bytes(self, element_size: int) -> int:
        """Of a block: what is loaded ahead."""
        return (self.block_rows + self.block_n) * self.block_k * element_size * self.stages


def product_tiles(
    num_pairs: int, num_experts: int, element_size: int, shared_bytes: int = LEAST_SHARED
) -> ProductTiles:
    """Few rows for each expert: as many loads of weights under way as there can be. Many: weights
    are used for more rows at a time. ``shared_bytes``: of a block of the GPU.

    They must not hang on anything else, or the base's rows would change their bits.
    """
    rows = _LEAST_ROWS
    while rows < _MOST_ROWS and rows * num_experts < _ROOM * num_pairs:
        rows *= 2
    if rows <= 32:
        return ProductTiles(rows, 64, 256 // element_size, warps=4, stages=4)
    block_k = 128 // element_size
    if rows == 64:
        return ProductTiles(rows, 128, block_k, warps=4, stages=4)
    wide = ProductTiles(rows, 256, block_k, warps=8, stages=4)
    if wide.shared_bytes(element_size) <= shared_bytes:
        return wide
    return ProductTiles(rows, 128, block_k, warps=8, stages=3)


def run_rows(num_pairs: int, num_experts: int, *, few: bool) -> int:
    """Rows of a piece of one expert and slot."""
    return _LONG_RUN_ROWS if few and num_pairs >= _LONG_RUN_ROWS * num_experts else _RUN_ROWS


def expert_lora_tiles(in_features: int, num_pairs: int, rank_bucket: int, block_rows: int) -> Tiles:
    """K is hardly split: there is a product beside, and who adds the delta must add the splits."""
    ranks = min(rank_bucket, MAX_RANK_BLOCK)
    split_k = min(2 if num_pairs <= 128 else 1, -(-in_features // _BLOCK_K))
    stages = 2 if block_rows > _RUN_ROWS and ranks > 16 else 3
    return Tiles(split_k, _BLOCK_K, ranks, shrink_stages=stages, expand_ranks=ranks, block_n=128)


def stand_alone(num_pairs: int) -> bool:
    """Whether each pair is taken by itself."""
    return num_pairs <= ALONE_PAIRS


def added_by_pair(num_pairs: int, num_experts: int, *, few: bool) -> bool:
    """Whether deltas are added pair by pair, rather than to a run of expert and slot at a time."""
    most = PAIRS_PER_EXPERT_OF_FEW if few else PAIRS_PER_EXPERT_OF_MANY
    return stand_alone(num_pairs) or num_pairs <= most * num_experts


def combine_warps(num_pairs: int) -> int:
    """Of a program that adds deltas to a token's sum: fewer where there are more programs than the
    GPU has room for."""
    return 4 if stand_alone(num_pairs) else 2


def num_pieces(num_pairs: int, num_runs: int, rows: int) -> int:
    """Most pieces of at most so many rows into which at most ``num_runs`` runs can be cut."""
    return min(num_pairs, num_runs + num_pairs // rows)
