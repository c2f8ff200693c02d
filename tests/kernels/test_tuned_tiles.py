"""Other tiles compute the same: those of a table, and all that ``loramux tune`` tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from loramux.lora.segments import padded_rows
from loramux.ops.tile_search import grid_of, variants
from loramux.ops.tiles import (
    FEW_ADAPTERS,
    LONG_FROM,
    MIDDLE_FROM,
    SHORT_ROWS,
    FixedTiles,
    Tiles,
    block_rows_of,
    choose_tiles,
)
from loramux.ops.triton_lora import TritonOps
from loramux.ops.tuning import Entry, Key, Shape, Table, TableTiles
from loramux.types import Slot
from loramux.worker import tile_timer
from loramux.worker.tile_timer import SiteCopies, Step
from tests.cpu.adapted_linear import AdaptedLinear, assert_close, load_slots

SLOTS = FEW_ADAPTERS + 1
TABLED = {
    (53, (40, 17, 9)): Tiles(split_k=4, block_k=16, block_n=16),
    (24, (100,)): Tiles(split_k=2, block_k=32, shrink_ranks=32, block_n=64, expand_ranks=16),
    (130, (7, 33)): Tiles(split_k=16, block_k=64, shrink_ranks=64, expand_ranks=32, block_n=32),
}


@pytest.mark.parametrize("shape", TABLED, ids=str)
def test_tiles_of_a_table_follow_the_formula(
    shape: tuple[int, tuple[int, ...]], device: torch.device
) -> None:
    in_features, sizes = shape
    tiles = TABLED[shape]
    large = tiles.shrink_ranks > 16
    key = Key(Shape(in_features, sizes), "up to 16", "up to 64" if large else "up to 16", few=False)
    table = TableTiles([Table("any", "", {}, (Entry(key, tiles, None),))])
    linear = AdaptedLinear(in_features, sizes, SLOTS, device=device)
    load_slots(linear, (40, 33, 64) if large else (3, 16, 8))
    ops = TritonOps(
        padded_rows=padded_rows(SLOTS, linear.max_tokens),
        max_rank=64,
        device=device,
        chooser=table,
    )
    ops.begin_step(64 if large else 16, few=False)
    slots = [Slot(row % (SLOTS + 1)) for row in range(9)]
    assert table.choose(in_features, sizes, len(slots), 64 if large else 16, False) == tiles
    x, y = linear.rows(len(slots))
    assert_close(linear.run(ops, slots, x, y), linear.expected(slots, x, y))


def test_a_workspace_holds_more_splits_than_the_rule_makes(device: torch.device) -> None:
    linear = load_slots(AdaptedLinear(600, (40,), SLOTS, device=device), (16,))
    rows = padded_rows(SLOTS, linear.max_tokens)

    def ops(splits: int) -> TritonOps:
        tiles = FixedTiles(Tiles(split_k=splits, block_k=16))
        return TritonOps(padded_rows=rows, max_rank=16, device=device, chooser=tiles)

    assert ops(32).workspace_bytes == 4 * ops(8).workspace_bytes
    large = ops(32)
    large.begin_step(16, few=False)
    slots = [Slot(row % SLOTS) for row in range(linear.max_tokens)]
    x, y = linear.rows(len(slots))
    assert_close(linear.run(large, slots, x, y), linear.expected(slots, x, y))


@pytest.fixture(scope="module")
def copies(device: torch.device) -> SiteCopies:
    shape = Shape(53, (40, 17))
    return SiteCopies(shape, 16, SLOTS, num_copies=2, device=device, dtype=torch.float32)


def candidates(num_rows: int, *, few: bool) -> list[Tiles]:
    """The first tiles and each that differs from them in one parameter."""
    block_rows = block_rows_of(num_rows, few)
    start, grid = choose_tiles(53, block_rows, 16, few=few), grid_of(block_rows, 16)
    return [start, *(tiles for field in grid for tiles in variants(start, field, grid))]


@pytest.mark.parametrize("tiles", candidates(7, few=True), ids=str)
def test_tiles_that_are_tried_in_short_steps_are_right(copies: SiteCopies, tiles: Tiles) -> None:
    for num_adapters in (1, SLOTS):
        step = Step(copies, 7, num_adapters)
        assert step.error(step.ops(tiles)) < 1e-5


@pytest.mark.parametrize("tiles", candidates(MIDDLE_FROM, few=True), ids=str)
def test_tiles_that_are_tried_for_few_adapters_are_right(copies: SiteCopies, tiles: Tiles) -> None:
    step = Step(copies, MIDDLE_FROM, 1)
    assert step.error(step.ops(tiles)) < 1e-5


@pytest.mark.slow
def test_tiles_that_are_tried_in_long_steps_are_right(copies: SiteCopies) -> None:
    step = Step(copies, LONG_FROM, SLOTS)
    for tiles in candidates(LONG_FROM, few=False):
        assert step.error(step.ops(tiles)) < 1e-5


def test_tiles_are_compiled_for_dora_as_well(
    copies: SiteCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms: list[bool] = []

    def compile_kernel(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        if "BESIDE" in options:
            forms.append(options["BESIDE"])

    monkeypatch.setattr(tile_timer, "compile_kernel", compile_kernel)
    Step(copies, 7, 1).compile(choose_tiles(53, SHORT_ROWS, 16, few=True))
    assert forms == [True, False]


def test_wrong_tiles_would_be_found_out(copies: SiteCopies) -> None:
    step = Step(copies, 7, 1)
    ops = step.ops(choose_tiles(53, SHORT_ROWS, 16, few=True))
    copies.tables.table[0, 0, 0] += 4  # A of the first module, by one unit and more
    try:
        assert step.error(ops) > 0.1
    finally:
        copies.tables.table[0, 0, 0] -= 4


def test_long_segments_may_have_small_tiles(copies: SiteCopies) -> None:
    step = Step(copies, LONG_FROM + 3, 1)
    block_rows = block_rows_of(LONG_FROM, few=True)
    tiles = replace(choose_tiles(53, block_rows, 16, few=True), block_n=16, block_k=16)
    assert step.error(step.ops(tiles)) < 1e-5
