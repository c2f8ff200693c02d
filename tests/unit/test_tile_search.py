from __future__ import annotations

from dataclasses import asdict

from loramux.ops.tile_search import grid_of, search, variants
from loramux.ops.tiles import LONG_ROWS, SHORT_ROWS, Tiles
from loramux.ops.tuning import Measured

START = Tiles(split_k=8)


class FakeTimer:
    """Costs by field and value on top of 100; notes what it was asked."""

    def __init__(
        self, costs: dict[tuple[str, int], float], too_large: set[tuple[str, int]]
    ) -> None:
        self.costs, self.too_large = costs, too_large
        self.asked: list[Tiles] = []

    def __call__(self, tiles: Tiles) -> Measured | None:
        self.asked.append(tiles)
        values = asdict(tiles).items()
        if self.too_large & set(values):
            return None
        cost = 100 + sum(self.costs.get(value, 0.0) for value in values)
        return Measured(cost - 10, cost + 10)


def test_each_parameter_takes_its_best_value() -> None:
    timer = FakeTimer({("split_k", 4): -5, ("block_n", 128): -3, ("expand_warps", 8): 2}, set())
    found = search(START, grid_of(SHORT_ROWS), timer)
    assert found.tiles == Tiles(split_k=4, block_n=128)
    assert found.measured == Measured(82, 102)
    assert found.start == Measured(90, 110)


def test_later_parameters_are_searched_from_the_best_of_the_earlier_ones() -> None:
    timer = FakeTimer({("split_k", 2): -5}, set())
    search(START, grid_of(SHORT_ROWS), timer)
    first, *rest = [t for t in timer.asked if t.block_n == 128]
    assert (first.split_k, rest) == (2, [])


def test_the_search_takes_about_ten_measurements_and_none_twice() -> None:
    for block_rows in (SHORT_ROWS, LONG_ROWS):
        timer = FakeTimer({}, set())
        search(START, grid_of(block_rows), timer)
        assert len(timer.asked) == len(set(timer.asked)) <= 11


def test_a_gain_within_the_noise_changes_nothing() -> None:
    found = search(START, grid_of(SHORT_ROWS), FakeTimer({("block_k", 256): -0.09}, set()))
    assert found.tiles == START


def test_the_mean_of_both_batches_decides() -> None:
    def measure(tiles: Tiles) -> Measured:
        # Fewer splits: better for many adapters, but worse by more for one.
        return Measured(10.0, 20.0) if tiles.split_k == 8 else Measured(18.0, 14.0)

    assert search(START, {"split_k": (4, 8)}, measure).tiles.split_k == 8


def test_tiles_without_room_on_the_gpu_are_passed_over() -> None:
    timer = FakeTimer({("shrink_stages", 4): -50}, {("shrink_stages", 4)})
    assert search(START, grid_of(SHORT_ROWS), timer).tiles == START


def test_others_are_found_where_the_first_tiles_have_no_room() -> None:
    found = search(START, grid_of(SHORT_ROWS), FakeTimer({}, {("shrink_stages", 3)}))
    assert found.start is None
    assert found.tiles == Tiles(split_k=8, shrink_stages=2)


def test_no_times_are_told_where_nothing_has_room() -> None:
    found = search(START, grid_of(SHORT_ROWS), FakeTimer({}, {("shrink_warps", 4)}))
    assert found.measured is None


def test_long_segments_are_not_split() -> None:
    assert "split_k" not in grid_of(LONG_ROWS)


def test_variants_differ_in_one_field() -> None:
    assert list(variants(START, "split_k", {"split_k": (4, 8, 16)})) == [
        Tiles(split_k=4),
        Tiles(split_k=16),
    ]
