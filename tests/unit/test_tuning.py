from __future__ import annotations

import json
import logging
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loramux
from loramux.errors import ConfigError
from loramux.ops import tuning
from loramux.ops.tiles import DefaultTiles, Tiles, choose_tiles
from loramux.ops.tuning import (
    Entry,
    Key,
    Shape,
    Table,
    TableTiles,
    file_name,
    read_table,
    tile_chooser,
    write_table,
)

GPU = "NVIDIA Test 1"
SHORT, LONG = "up to 16", "from 1024"
SMALL, LARGE = "up to 16", "from 65"
ODD = Tiles(split_k=32, block_k=64, block_n=64)
"""Tiles that the default rule never gives."""


def table(
    *entries: tuple[Shape, str, str, Tiles], gpu: str = GPU, few: bool = True, time: float = 1.5
) -> Table:
    found = [
        Entry(Key(shape, rows, rank, few), tiles, time) for shape, rows, rank, tiles in entries
    ]
    return Table(gpu, "2026-01-02", {"torch": "9"}, tuple(found))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A table of one entry."""
    path = tmp_path / "table.json"
    write_table(table((Shape(64, (32, 8)), SHORT, SMALL, ODD)), path)
    return path


def change(file: Path, **fields: Any) -> None:
    """Write other values of the first entry's fields, or of its tiles'."""
    content = json.loads(file.read_text())
    entry = content["entries"][0]
    for name, value in fields.items():
        (entry["tiles"] if name in entry["tiles"] else entry)[name] = value
    file.write_text(json.dumps(content))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = table(
        (Shape(64, (32, 8)), SHORT, SMALL, ODD),
        (Shape(64, (32, 8)), LONG, LARGE, replace(ODD, shrink_ranks=64, expand_ranks=32)),
    )
    for_many = replace(written.entries[0], key=replace(written.entries[0].key, few=False))
    by_rule = replace(written.entries[1], measured=None)
    written = replace(written, entries=(*written.entries[:1], for_many, by_rule))
    write_table(written, tmp_path / "t.json")
    assert read_table(tmp_path / "t.json") == written


def test_a_written_table_has_one_entry_a_line(file: Path) -> None:
    assert len([line for line in file.read_text().splitlines() if '"tiles"' in line]) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"split_k": 3}, "split_k must be a power of two, not 3"),
        ({"split_k": "4"}, "split_k must be a whole number, not '4'"),
        ({"split_k": True}, "split_k must be a whole number, not True"),
        ({"block_n": 4096}, "block_n must be from 16 to 512, not 4096"),
        ({"shrink_stages": 0}, "shrink_stages must be from 1 to 8, not 0"),
        ({"expand_ranks": 8}, "expand_ranks must be from 16 to 64, not 8"),
        ({"shrink_ranks": 32}, "shrink_ranks must be at most 16 for this rank, not 32"),
        ({"rank": "up to 64", "expand_ranks": 32}, "expand_ranks (32) must divide shrink_ranks"),
        ({"rows": "up to 33"}, "rows is 'up to 33': one of 'up to 16',"),
        ({"rank": 16}, "rank is 16: one of 'up to 16',"),
        ({"adapters": "some"}, "adapters is 'some': one of 'few', 'many'"),
        ({"adapters": True}, "adapters is True: one of 'few', 'many'"),
        ({"in": 0}, "in must be a number of features"),
        ({"out": [1, 2, 3, 4]}, "out must be a list of one to 3"),
        ({"tiles": [1]}, "an object is wanted here, not [1]"),
        ({"measured": {"one_adapter": 1.0}}, "measured must be microseconds or null"),
        ({"measured": "1"}, "measured must be microseconds or null, not '1'"),
        ({"colour": "red"}, "unknown field colour"),
    ],
)
def test_a_malformed_entry_is_named_with_its_remedy(
    file: Path, fields: dict[str, Any], problem: str
) -> None:
    change(file, **fields)
    with pytest.raises(ConfigError) as caught:
        read_table(file)
    for part in (str(file), "entry 0", problem, "`loramux tune`"):
        assert part in str(caught.value)


def test_stages_need_be_no_power_of_two(file: Path) -> None:
    change(file, shrink_stages=3)
    assert read_table(file).entries[0].tiles.shrink_stages == 3


def test_a_second_entry_for_the_same_is_refused(file: Path) -> None:
    content = json.loads(file.read_text())
    content["entries"] *= 2
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"entry 1 \(64 -> 32\+8, .*an earlier entry"):
        read_table(file)


@pytest.mark.parametrize("field", ["gpu", "date", "versions", "entries"])
def test_a_table_without_a_field_is_refused(file: Path, field: str) -> None:
    content = json.loads(file.read_text())
    del content[field]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"field {field} is missing"):
        read_table(file)


def test_what_is_no_json_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read .*`loramux tune`"):
        read_table(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ConfigError, match=r"t\.json is no JSON .*`loramux tune`"):
        read_table(tmp_path / "t.json")


def test_the_very_shape_goes_before_a_near_one() -> None:
    near, exact = Tiles(split_k=1), Tiles(split_k=2)
    tiles = TableTiles(
        [table((Shape(64, (40,)), SHORT, SMALL, near), (Shape(64, (32, 8)), SHORT, SMALL, exact))]
    )
    assert tiles.choose(64, [32, 8], 16, 16, True) == exact
    assert tiles.choose(64, [40], 16, 16, True) == near


def test_the_nearest_shape_serves_where_there_is_no_entry() -> None:
    first, second = Tiles(split_k=1), Tiles(split_k=2)
    tiles = TableTiles(
        [table((Shape(64, (64,)), SHORT, SMALL, first), (Shape(256, (256,)), SHORT, SMALL, second))]
    )
    assert tiles.choose(80, [40, 40], 1, 16, True) == first
    assert tiles.choose(200, [100, 100], 1, 16, True) == second


@pytest.mark.parametrize(("in_features", "near"), [(256, True), (257, False), (16, True)])
def test_a_shape_of_another_size_is_not_near(in_features: int, near: bool) -> None:
    tiles = TableTiles([table((Shape(64, (64,)), SHORT, SMALL, ODD))])
    found = tiles.choose(in_features, [64], 1, 16, True)
    assert found == (ODD if near else DefaultTiles().choose(in_features, [64], 1, 16, True))


@pytest.mark.parametrize(
    ("rows", "rank_bucket", "known"),
    [(1, 16, True), (16, 16, True), (17, 16, False), (1024, 16, False), (16, 64, False)],
)
def test_entries_hold_for_their_buckets_only(rows: int, rank_bucket: int, known: bool) -> None:
    tiles = TableTiles([table((Shape(64, (64,)), SHORT, SMALL, ODD))])
    assert (tiles.choose(64, [64], rows, rank_bucket, True) == ODD) is known


@pytest.mark.parametrize("few", [True, False])
def test_entries_for_few_adapters_are_not_for_many(few: bool) -> None:
    tiles = TableTiles([table((Shape(64, (64,)), SHORT, SMALL, ODD), few=few)])
    for in_features in (64, 80):
        assert tiles.choose(in_features, [64], 1, 16, few) == ODD
        by_rule = DefaultTiles().choose(in_features, [64], 1, 16, not few)
        assert tiles.choose(in_features, [64], 1, 16, not few) == by_rule


def test_large_ranks_share_a_bucket() -> None:
    tiles = TableTiles([table((Shape(64, (64,)), LONG, LARGE, ODD))])
    assert [tiles.choose(64, [64], 4096, bucket, True) == ODD for bucket in (64, 128, 512)] == [
        False, True, True,
    ]  # fmt: skip


def test_an_earlier_table_goes_before_a_later_one() -> None:
    shapes = Shape(64, (64,)), Shape(4096, (64,))
    own = table((shapes[0], SHORT, SMALL, ODD))
    shipped = table(*((shape, SHORT, SMALL, Tiles(split_k=1)) for shape in shapes))
    tiles = TableTiles([own, shipped])
    assert tiles.choose(64, [64], 1, 16, True) == ODD
    assert tiles.choose(4096, [64], 1, 16, True) == Tiles(split_k=1)


def test_the_workspace_is_for_the_most_splits_of_table_and_rule() -> None:
    tiles = TableTiles(
        [
            table(
                (Shape(64, (64,)), SHORT, SMALL, replace(ODD, split_k=32)),
                (Shape(64, (64,)), LONG, SMALL, replace(ODD, split_k=2)),
            )
        ]
    )
    by_rule = DefaultTiles()
    assert tiles.max_split_k(16, 16) == 32
    assert tiles.max_split_k(64, 16) == 2
    assert tiles.max_split_k(16, 64) == by_rule.max_split_k(16, 64) == 8


@pytest.mark.parametrize(("few", "middle"), [(True, 64), (False, 8)])
def test_an_entry_for_steps_of_two_segment_lengths_counts_for_both(few: bool, middle: int) -> None:
    # Few adapters: 16 rows a segment up to 127 rows of the step, 32 from 128 on.
    tiles = TableTiles(
        [table((Shape(64, (64,)), "up to 128", SMALL, replace(ODD, split_k=64)), few=few)]
    )
    assert tiles.max_split_k(16, 16) == 64
    assert tiles.max_split_k(32, 16) == middle
    assert tiles.max_split_k(64, 16) == 1


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("rank_bucket", [16, 64, 512])
@pytest.mark.parametrize("rows", [1, 127, 128, 1023, 1024])
@pytest.mark.parametrize("in_features", [8, 53, 4096, 14336, 53248])
def test_the_rule_stays_within_its_own_most_splits(
    in_features: int, rows: int, rank_bucket: int, few: bool
) -> None:
    rule, block_rows = DefaultTiles(), 64 if rows >= 1024 else 32 if few and rows >= 128 else 16
    found = rule.choose(in_features, [64], rows, rank_bucket, few)
    assert found == choose_tiles(in_features, block_rows, rank_bucket, few=few)
    assert found.split_k <= rule.max_split_k(block_rows, rank_bucket)


@pytest.mark.parametrize(
    ("in_features", "rows", "rank_bucket", "few", "splits", "tiles"),
    [
        (4096, 64, 16, True, 8, 1),
        (4096, 64, 16, False, 8, 2),
        (4096, 64, 64, False, 4, 2),
        (4096, 64, 128, False, 4, 1),
        (4096, 128, 16, True, 4, 1),
        (14336, 128, 16, True, 8, 1),
        (4096, 2048, 16, False, 1, 1),
    ],
)
def test_the_rule_gives_many_adapters_several_tiles_and_middle_segments_fewer_splits(
    in_features: int, rows: int, rank_bucket: int, few: bool, splits: int, tiles: int
) -> None:
    found = DefaultTiles().choose(in_features, [64], rows, rank_bucket, few)
    assert (found.split_k, found.expand_tiles, found.expand_stages) == (splits, tiles, tiles)


def test_a_renewed_table_keeps_what_was_not_measured_again() -> None:
    shapes = Shape(64, (64,)), Shape(128, (64,)), Shape(256, (64,))
    old = table(*((s, SHORT, SMALL, ODD) for s in shapes[:2]), time=3.0)
    new = replace(
        table(*((s, SHORT, SMALL, Tiles(split_k=1)) for s in shapes[1:])), date="2027-01-01"
    )
    found = old.updated(new)
    assert (found.date, found.versions) == ("2027-01-01", new.versions)
    assert found.entries == (old.entries[0], *new.entries)


def test_a_table_that_cannot_be_written_stays_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_table(file)

    def full(self: Path, text: str, **how: Any) -> int:
        with self.open("w") as unfinished:
            unfinished.write(text[:20])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        write_table(replace(before, date="2027-01-01"), file)
    assert read_table(file) == before


def test_an_unknown_gpu_takes_the_rule_and_says_how_to_tune(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="loramux"):
        assert tile_chooser("Some Other GPU", None) == DefaultTiles()
    [message] = caplog.messages
    assert "Some Other GPU" in message
    assert "`loramux tune`" in message


def test_a_table_of_another_gpu_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"table\.json is for 'NVIDIA Test 1'.*'Other'"):
        tile_chooser("Other", str(file))


def test_a_given_table_goes_before_the_shipped_one(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_SHIPPED", tmp_path)
    shape, other = Shape(64, (32, 8)), Shape(4096, (4096,))
    shipped = table(*((s, SHORT, SMALL, Tiles(split_k=1)) for s in (shape, other)))
    write_table(shipped, tmp_path / file_name(GPU))
    assert tile_chooser(GPU, None).choose(64, [32, 8], 1, 16, True) == Tiles(split_k=1)
    both = tile_chooser(GPU, str(file))
    assert both.choose(64, [32, 8], 1, 16, True) == ODD
    assert both.choose(4096, [4096], 1, 16, True) == Tiles(split_k=1)


SHIPPED = sorted((Path(loramux.__file__).parent / "ops" / "tuned").glob("*"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_tables_are_well_formed_and_named_after_their_gpu(path: Path) -> None:
    found = read_table(path)
    assert path.name == file_name(found.gpu)
    assert found.entries


def test_the_shipped_tables_are_part_of_the_package() -> None:
    assert "NVIDIA_H200.json" in [path.name for path in SHIPPED]
    root = Path(loramux.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["loramux"]
    packed = {path for pattern in patterns for path in (root / "src/loramux").glob(pattern)}
    assert set(SHIPPED) <= packed
