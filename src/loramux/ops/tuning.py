"""Tables of tile sizes: one JSON file for each GPU, made by ``loramux tune``.

Those in ``ops/tuned`` are shipped. An entry holds for launches of one shape (input features, sizes
of the slices), a bucket of the step's rows, a bucket of ranks, and few or many adapters. Lookup
takes the entry of the very shape; else that of the nearest shape with all else the same; else
``choose_tiles``. Nearest is the least ``|log2(in / in')| + |log2(out / out')|``, where out is the
sum of the slices, as long as it is at most 2 (a factor of four).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import log2
from pathlib import Path
from typing import Any

from loramux.errors import ConfigError
from loramux.ops.tiles import (
    LONG_FROM,
    MAX_RANK_BLOCK,
    MAX_SLICES,
    DefaultTiles,
    TileChooser,
    Tiles,
    block_rows_of,
)

log = logging.getLogger(__name__)

ROW_BUCKETS = {
    "up to 16": range(17),
    "up to 64": range(17, 65),
    "up to 128": range(65, 129),
    f"up to {LONG_FROM - 1}": range(129, LONG_FROM),
    f"from {LONG_FROM}": range(LONG_FROM, sys.maxsize),
}
"""Rows of a step, by the name that a table gives them."""
RANK_BUCKETS = {
    "up to 16": range(17),
    "up to 64": range(17, 65),
    "from 65": range(65, sys.maxsize),
}
"""Rank buckets of a step, by the name that a table gives them."""
ADAPTERS = {"few": True, "many": False}
"""Whether a step's adapters are few, by the name that a table gives it."""

_LIMITS = {
    "split_k": (1, 64),
    "block_k": (16, 512),
    "shrink_ranks": (16, MAX_RANK_BLOCK),
    "shrink_warps": (1, 16),
    "shrink_stages": (1, 8),
    "block_n": (16, 512),
    "expand_ranks": (16, MAX_RANK_BLOCK),
    "expand_warps": (1, 16),
    "expand_stages": (1, 8),
    "expand_tiles": (1, 64),
}
_ANY_NUMBER = ("shrink_stages", "expand_stages", "expand_tiles")
"""Fields that need be no power of two."""
_FARTHEST = 2.0
_SHIPPED = Path(__file__).with_name("tuned")
_REMEDY = "correct it, or make the table anew with `loramux tune`"


@dataclass(frozen=True, slots=True)
class Shape:
    """What launches of one kind have in common: a site, or a part of one with many slices."""

    in_features: int
    sizes: tuple[int, ...]
    """Columns of each slice."""

    def __str__(self) -> str:
        return f"{self.in_features} -> {'+'.join(map(str, self.sizes))}"

    def distance(self, other: Shape) -> float:
        """How unlike two shapes are, in doublings."""
        return abs(log2(self.in_features / other.in_features)) + abs(
            log2(sum(self.sizes) / sum(other.sizes))
        )


@dataclass(frozen=True, slots=True)
class Key:
    """What tiles are chosen by; ``rows`` and ``rank`` are names of buckets."""

    shape: Shape
    rows: str
    rank: str
    few: bool

    def __str__(self) -> str:
        adapters = "few" if self.few else "many"
        return f"{self.shape}, rows {self.rows}, rank {self.rank}, {adapters} adapters"


@dataclass(frozen=True, slots=True)
class Entry:
    """Tiles of a key."""

    key: Key
    tiles: Tiles
    measured: float | None
    """Microseconds that a launch adds beside the base's product; None where the tiles come from a
    rule."""


@dataclass(frozen=True)
class Table:
    """A file: what was found on one GPU."""

    gpu: str
    date: str
    versions: Mapping[str, str]
    entries: tuple[Entry, ...]

    def updated(self, newer: Table) -> Table:
        """The newer table with this one's entries for keys that it has none for."""
        assert self.gpu == newer.gpu, "tiles of one GPU are nothing to another"
        both = {entry.key: entry for entry in (*self.entries, *newer.entries)}
        return replace(newer, entries=tuple(both.values()))


class TableTiles:
    """Implements ``ops.tiles.TileChooser`` by tables, and by the default rule beyond them."""

    def __init__(self, tables: Iterable[Table]) -> None:
        """Earlier tables go before later ones, entry by entry."""
        self._entries: dict[Key, Tiles] = {}
        for table in tables:
            for entry in table.entries:
                self._entries.setdefault(entry.key, entry.tiles)
        self._default = DefaultTiles()
        # A step asks for every site of every layer, always for the same ones.
        self._chosen: dict[tuple[int, tuple[int, ...], int, int, bool], Tiles] = {}

    def choose(
        self, in_features: int, sizes: Sequence[int], rows: int, rank_bucket: int, few: bool
    ) -> Tiles:
        asked = (in_features, tuple(sizes), rows, rank_bucket, few)
        if asked not in self._chosen:
            self._chosen[asked] = self._look_up(*asked) or self._default.choose(*asked)
        return self._chosen[asked]

    def max_split_k(self, block_rows: int, rank_bucket: int) -> int:
        rank = bucket_of(RANK_BUCKETS, rank_bucket)
        splits = [
            tiles.split_k
            for key, tiles in self._entries.items()
            if key.rank == rank and block_rows in _segment_lengths(key)
        ]
        return max([self._default.max_split_k(block_rows, rank_bucket), *splits])

    def _look_up(
        self, in_features: int, sizes: tuple[int, ...], rows: int, rank_bucket: int, few: bool
    ) -> Tiles | None:
        shape = Shape(in_features, sizes)
        key = Key(shape, bucket_of(ROW_BUCKETS, rows), bucket_of(RANK_BUCKETS, rank_bucket), few)
        if key in self._entries:
            return self._entries[key]
        near = sorted(
            (distance, other.shape.in_features, other.shape.sizes)
            for other in self._entries
            if other == replace(key, shape=other.shape)
            and (distance := shape.distance(other.shape)) <= _FARTHEST
        )
        if not near:
            return None
        _, in_features, sizes = near[0]
        return self._entries[replace(key, shape=Shape(in_features, sizes))]


def _segment_lengths(key: Key) -> set[int]:
    """Rows of a segment in the least and in the largest steps that an entry holds for."""
    rows = ROW_BUCKETS[key.rows]
    return {block_rows_of(rows[0], key.few), block_rows_of(rows[-1], key.few)}


def tile_chooser(gpu: str, file: str | None) -> TileChooser:
    """What chooses tiles on a GPU of this name: a user's table, then the shipped one.

    Raises ConfigError where the user's table is malformed or of another GPU.
    """
    shipped = _SHIPPED / file_name(gpu)
    places = [Path(file).expanduser()] if file is not None else []
    if shipped.is_file():
        places.append(shipped)
    tables = [read_table(place) for place in places]
    for place, table in zip(places, tables, strict=True):
        if table.gpu != gpu:
            raise ConfigError(
                f"the tuning table {place} is for {table.gpu!r} and this GPU is {gpu!r}: make one "
                "with `loramux tune` on this machine, or leave --tuning out"
            )
    if not tables:
        log.info("no tiles are known for %s: a rule serves; `loramux tune` makes a table", gpu)
        return DefaultTiles()
    log.info("LoRA tiles for %s from %s", gpu, ", then ".join(map(str, places)))
    return TableTiles(tables)


def file_name(gpu: str) -> str:
    """The file of a GPU's table: ``"NVIDIA H200"`` has ``NVIDIA_H200.json``."""
    return re.sub(r"[^\w.-]+", "_", gpu) + ".json"


def bucket_of(buckets: Mapping[str, range], number: int) -> str:
    """The name of the bucket that holds a number."""
    return next(name for name, numbers in buckets.items() if number in numbers)


def read_table(file: Path) -> Table:
    """Raises ConfigError, which names the file, the entry and the remedy."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the tuning table {file} cannot be read ({error.strerror}): name a file that "
            "`loramux tune` has written"
        ) from error
    except ValueError as error:
        raise ConfigError(f"the tuning table {file} is no JSON ({error}): {_REMEDY}") from error
    place = "the table"
    try:
        _expect_fields(content, [f.name for f in fields(Table)])
        _expect(isinstance(content["gpu"], str), "gpu must be a name")
        _expect(isinstance(content["date"], str), "date must be text")
        _expect(isinstance(content["versions"], dict), "versions must be an object")
        _expect(isinstance(content["entries"], list), "entries must be a list")
        entries: dict[Key, Entry] = {}
        for number, value in enumerate(content["entries"]):
            place = f"entry {number}"
            key = _read_key(value)
            place = f"entry {number} ({key})"
            _expect(key not in entries, "there is an earlier entry for the same")
            entries[key] = Entry(
                key, _read_tiles(value["tiles"], key), _read_measured(value["measured"])
            )
    except _MalformedError as error:
        raise ConfigError(f"the tuning table {file}, {place}: {error}; {_REMEDY}") from error
    return Table(content["gpu"], content["date"], content["versions"], tuple(entries.values()))


def write_table(table: Table, file: Path) -> None:
    """One entry a line, so that tables can be compared. The file is whole at any time."""
    head = {"gpu": table.gpu, "date": table.date, "versions": dict(table.versions)}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    entries = ",\n".join(f"  {json.dumps(_entry_fields(entry))}" for entry in table.entries)
    text = "\n".join(["{", *lines, ' "entries": [', entries, " ]", "}", ""])
    unfinished = file.with_name(file.name + ".new")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)


class _MalformedError(Exception):
    """What is wrong with an entry."""


def _entry_fields(entry: Entry) -> dict[str, Any]:
    return {
        "in": entry.key.shape.in_features,
        "out": list(entry.key.shape.sizes),
        "rows": entry.key.rows,
        "rank": entry.key.rank,
        "adapters": "few" if entry.key.few else "many",
        "tiles": asdict(entry.tiles),
        "measured": entry.measured,
    }


def _read_key(value: Any) -> Key:
    _expect_fields(value, ["in", "out", "rows", "rank", "adapters", "tiles", "measured"])
    in_features, sizes = value["in"], value["out"]
    _expect(_is_size(in_features), "in must be a number of features")
    _expect(
        isinstance(sizes, list) and 0 < len(sizes) <= MAX_SLICES and all(map(_is_size, sizes)),
        f"out must be a list of one to {MAX_SLICES} numbers of features",
    )
    for name, names in (("rows", ROW_BUCKETS), ("rank", RANK_BUCKETS), ("adapters", ADAPTERS)):
        found = value[name]
        known = ", ".join(map(repr, names))
        _expect(isinstance(found, str) and found in names, f"{name} is {found!r}: one of {known}")
    shape = Shape(in_features, tuple(sizes))
    return Key(shape, value["rows"], value["rank"], ADAPTERS[value["adapters"]])


def _read_tiles(value: Any, key: Key) -> Tiles:
    _expect_fields(value, list(_LIMITS))
    for name, (low, high) in _LIMITS.items():
        number = value[name]
        _expect(type(number) is int, f"{name} must be a whole number, not {number!r}")
        _expect(low <= number <= high, f"{name} must be from {low} to {high}, not {number}")
        _expect(
            name in _ANY_NUMBER or number & (number - 1) == 0,
            f"{name} must be a power of two, not {number}",
        )
    tiles = Tiles(**value)
    # Kernels work on whole blocks of ranks: a larger one would write into its neighbour's.
    largest = min(RANK_BUCKETS[key.rank].stop - 1, MAX_RANK_BLOCK)
    _expect(
        tiles.shrink_ranks <= largest,
        f"shrink_ranks must be at most {largest} for this rank, not {tiles.shrink_ranks}",
    )
    _expect(
        tiles.shrink_ranks % tiles.expand_ranks == 0,
        f"expand_ranks ({tiles.expand_ranks}) must divide shrink_ranks ({tiles.shrink_ranks})",
    )
    return tiles


def _read_measured(value: Any) -> float | None:
    known = value is None or type(value) in (int, float)
    _expect(known, f"measured must be microseconds or null, not {value!r}")
    return value


def _expect_fields(value: Any, names: Sequence[str]) -> None:
    _expect(isinstance(value, dict), f"an object is wanted here, not {value!r}")
    unknown, missing = [n for n in value if n not in names], [n for n in names if n not in value]
    _expect(not unknown, f"unknown field {', '.join(unknown)}")
    _expect(not missing, f"field {', '.join(missing)} is missing")


def _expect(right: bool, problem: str) -> None:
    if not right:
        raise _MalformedError(problem)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
