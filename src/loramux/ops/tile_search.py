"""The search for good tiles: one parameter after the other, each time keeping the best so far.

Parameters of shrink come first, then those of expand; each is tried at all its values while the
others stay. That takes about ten measurements where the whole grid has 192; what it finds is never
slower than the start, and need not be the best of the grid. Better is the lower mean of the two
batches that ``Measured`` holds, by more than what two measurements of the same differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from loramux.ops.tiles import SHORT_ROWS, Tiles
from loramux.ops.tuning import Measured

Measure = Callable[[Tiles], Measured | None]
"""Times tiles; None where the GPU has no room for them."""

Grid = Mapping[str, tuple[int, ...]]
"""Values to try, by fields of ``Tiles`` in the order in which they are searched."""

_LONG_GRID: Grid = {
    "block_k": (128, 256),
    "shrink_stages": (2, 3, 4),
    "block_n": (128, 256),
    "expand_warps": (4, 8),
    "expand_stages": (1, 2),
}
_SHORT_GRID: Grid = {"split_k": (2, 4, 8, 16), **_LONG_GRID}
_NOISE = 0.1
"""Microseconds."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best tiles, their times, and those of the tiles that the search began with."""

    tiles: Tiles
    measured: Measured | None
    """None where the GPU has room for none of those tried."""
    start: Measured | None


def grid_of(block_rows: int) -> Grid:
    """What to try for segments of so many rows; long ones fill a GPU without splits."""
    return _SHORT_GRID if block_rows == SHORT_ROWS else _LONG_GRID


def search(start: Tiles, grid: Grid, measure: Measure) -> Found:
    """The best tiles on the way from ``start``."""
    tiles = start
    best = started = measure(start)
    for field in grid:
        for candidate in variants(tiles, field, grid):
            measured = measure(candidate)
            if measured is not None and (best is None or measured.cost < best.cost - _NOISE):
                tiles, best = candidate, measured
    return Found(tiles, best, started)


def variants(tiles: Tiles, field: str, grid: Grid) -> Iterator[Tiles]:
    """The same tiles with each other value of one field."""
    for value in grid[field]:
        if value != asdict(tiles)[field]:
            yield replace(tiles, **{field: value})
