from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from loramux.ops.tile_search import Grid, grid_of, search, variants
from loramux.ops.tiles import LONG_ROWS, MIDDLE_ROWS, SHORT_ROWS, Tiles

START = Tiles(split_k=8)
GRID = grid_of(SHORT_ROWS, 16)


class FakeTimer:
    """Costs by field and value on top of 100; notes what it was asked."""

    def __init__(
        self, costs: dict[tuple[str, int], float], too_large: set[tuple[str, int]]
    ) -> None:
        self.costs, self.too_large = costs, too_large
        self.prepared: set[Tiles] = set()
        self.asked: list[Tiles] = []

    def prepare(self, candidates: Sequence[Tiles]) -> None:
        self.prepared.update(candidates)

    def measure(self, tiles: Tiles) -> float | None:
        assert tiles in self.prepared
        self.asked.append(tiles)
        values = asdict(tiles).items()
        if self.too_large & set(values):
            return None
        return 100 + sum(self.costs.get(value, 0.0) for value in values)


def test_each_parameter_takes_its_best_value() -> None:
    timer = FakeTimer({("split_k", 4): -5, ("block_n", 128): -3, ("expand_warps", 8): 2}, set())
    found = search(START, GRID, timer)
    assert found.tiles == Tiles(split_k=4, block_n=128)
    assert (found.measured, found.start) == (92, 100)


def test_later_parameters_are_searched_from_the_best_of_the_earlier_ones() -> None:
    timer = FakeTimer({("split_k", 2): -5}, set())
    search(START, GRID, timer)
    first, *rest = [t for t in timer.asked if t.block_n == 128]
    assert (first.split_k, rest) == (2, [])


def test_splits_are_searched_again_when_all_else_is_found() -> None:
    class Changing(FakeTimer):
        """Two splits are best with one stage, sixteen with three."""

        def measure(self, tiles: Tiles) -> float | None:
            self.asked.append(tiles)
            best = 16 if tiles.expand_stages == 3 else 2
            return 100.0 - 10 * tiles.expand_stages - 5 * (tiles.split_k == best)

    timer = Changing({}, set())
    found = search(START, GRID, timer)
    assert (found.tiles.split_k, found.tiles.expand_stages) == (16, 3)
    assert any(t.split_k == 2 and t.expand_stages == 1 for t in timer.asked)


@pytest.mark.parametrize("block_rows", [SHORT_ROWS, MIDDLE_ROWS, LONG_ROWS])
@pytest.mark.parametrize("best", [{}, {("split_k", 2): -5.0, ("expand_tiles", 4): -5.0}])
def test_the_search_takes_about_18_measurements_and_none_twice(
    block_rows: int, best: dict[tuple[str, int], float]
) -> None:
    timer = FakeTimer(best, set())
    search(START, grid_of(block_rows, 16), timer)
    assert 10 < len(timer.asked) == len(set(timer.asked)) <= 18


def test_little_is_prepared_that_is_never_measured() -> None:
    timer = FakeTimer({("split_k", 2): -5, ("shrink_stages", 2): -5}, set())
    search(START, GRID, timer)
    assert len(timer.prepared) <= len(timer.asked) + 10


def test_a_gain_within_the_noise_changes_nothing() -> None:
    found = search(START, GRID, FakeTimer({("block_k", 256): -0.09}, set()))
    assert found.tiles == START


def test_tiles_without_room_on_the_gpu_are_passed_over() -> None:
    timer = FakeTimer({("shrink_stages", 4): -50}, {("shrink_stages", 4)})
    assert search(START, GRID, timer).tiles == START


def test_others_are_found_where_the_first_tiles_have_no_room() -> None:
    found = search(START, GRID, FakeTimer({}, {("shrink_stages", 3)}))
    assert found.start is None
    assert found.tiles == Tiles(split_k=8, shrink_stages=2)


def test_no_times_are_told_where_nothing_has_room() -> None:
    found = search(START, GRID, FakeTimer({}, {("shrink_warps", 4)}))
    assert found.measured is None


def test_long_segments_are_not_split() -> None:
    assert "split_k" not in grid_of(LONG_ROWS, 16)
    assert "split_k" in grid_of(MIDDLE_ROWS, 16)


@pytest.mark.parametrize(("rank_bucket", "one_block"), [(16, True), (64, True), (128, False)])
def test_several_tiles_a_block_are_tried_where_ranks_are_one_block(
    rank_bucket: int, one_block: bool
) -> None:
    grid = grid_of(SHORT_ROWS, rank_bucket)
    assert ("expand_tiles" in grid) == ("expand_stages" in grid) == one_block


def test_variants_differ_in_one_field() -> None:
    grid: Grid = {"split_k": (4, 8, 16)}
    assert list(variants(START, "split_k", grid)) == [Tiles(split_k=4), Tiles(split_k=16)]
