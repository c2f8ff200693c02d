"""The search for good tiles: one parameter after the other, each time keeping the best so far.

Each is tried at all its values while the others stay. The splits come first and once more at the
end, because both kernels and all the rest hang on them. That takes about 18 measurements where the
whole grid has 1,944; what it finds is never slower than the start, and need not be the best of the
grid. Better is faster by more than what two measurements of the same differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from loramux.ops.tiles import LONG_ROWS, MAX_RANK_BLOCK, Tiles

Grid = Mapping[str, tuple[int, ...]]
"""Values to try, by fields of ``Tiles`` in the order in which they are searched."""

_GRID: Grid = {
    "split_k": (2, 4, 8, 16),
    "shrink_stages": (2, 3, 4),
    "block_k": (64, 128, 256),
    "expand_tiles": (1, 2, 4),
    "expand_stages": (1, 2, 3),
    "block_n": (128, 256),
    "expand_warps": (2, 4, 8),
}
_ONE_BLOCK = ("expand_tiles", "expand_stages")
"""Fields that only help where all ranks are one block: else planes are read for every tile."""
_NOISE = 0.1
"""Microseconds."""


class TileTimer(Protocol):
    """Times launches of one shape in one kind of step."""

    def prepare(self, candidates: Sequence[Tiles]) -> None:
        """Hear which tiles may be measured soon, some of them perhaps again."""
        ...

    def measure(self, tiles: Tiles) -> float | None:
        """Microseconds; None where the tiles cannot run."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """The best tiles, their time, and that of the tiles that the search began with."""

    tiles: Tiles
    measured: float | None
    """None where none of those tried can run."""
    start: float | None


def grid_of(block_rows: int, rank_bucket: int) -> Grid:
    """What to try for segments of so many rows; long ones fill a GPU without splits."""
    left_out = ["split_k"] if block_rows == LONG_ROWS else []
    if rank_bucket > MAX_RANK_BLOCK:
        left_out += _ONE_BLOCK
    return {field: values for field, values in _GRID.items() if field not in left_out}


def search(start: Tiles, grid: Grid, timer: TileTimer) -> Found:
    """The best tiles on the way from ``start``."""
    tiles, times = start, dict[Tiles, float | None]()
    for fields in _stages(grid):
        for position, field in enumerate(fields):
            ahead = [tiles, *(v for f in fields[position:] for v in variants(tiles, f, grid))]
            timer.prepare([candidate for candidate in ahead if candidate not in times])
            for candidate in (tiles, *variants(tiles, field, grid)):
                if candidate not in times:
                    times[candidate] = timer.measure(candidate)
                measured, best = times[candidate], times[tiles]
                if measured is not None and (best is None or measured < best - _NOISE):
                    tiles = candidate
    return Found(tiles, times[tiles], times[start])


def _stages(grid: Grid) -> list[list[str]]:
    """Fields in the order in which they are searched, cut where what comes next is not known before
    the number of splits is."""
    splits = [field for field in grid if field == "split_k"]
    rest = [field for field in grid if field != "split_k"]
    return [splits, rest, splits]


def variants(tiles: Tiles, field: str, grid: Grid) -> Iterator[Tiles]:
    """The same tiles with each other value of one field."""
    for value in grid[field]:
        if value != asdict(tiles)[field]:
            yield replace(tiles, **{field: value})
