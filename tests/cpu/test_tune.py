"""``loramux tune`` up to the clock, which needs a GPU (``tests/kernels/test_tune_on_gpu.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from loramux import LLM
from loramux.cli import main as cli
from loramux.config import AdapterOptions, EngineOptions, ModelOptions
from loramux.errors import ConfigError
from loramux.model.anatomy import examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import adopt
from loramux.ops.tiles import Tiles, choose_tiles
from loramux.ops.tuning import ROW_BUCKETS, Key, Shape, read_table, write_table
from loramux.testing import tiny_model
from loramux.worker import tile_timer, tune

SMALL = {"small": [(64, (32, 8)), (32, (64,))]}


def test_the_sites_of_a_base_are_its_distinct_launches() -> None:
    base = adopt("tiny", tiny_model(hidden_size=32, intermediate_size=56))
    assert tune.shapes_of(examine(base, AttentionSeam(base.model))) == [
        Shape(32, (32, 16, 16)),
        Shape(32, (32,)),
        Shape(32, (56, 56)),
        Shape(56, (32,)),
    ]


def test_each_bucket_is_measured_at_rows_of_its_own() -> None:
    assert set(tune.MEASURED_ROWS) == set(ROW_BUCKETS)
    assert all(rows in ROW_BUCKETS[name] for name, rows in tune.MEASURED_ROWS.items())


def test_copies_of_a_site_are_larger_than_the_cache() -> None:
    shape = Shape(4096, (4096,))
    assert tile_timer.copies_for(shape, 50 * 2**20) * shape.in_features * 4096 * 2 >= 4 * 50 * 2**20
    assert tile_timer.copies_for(Shape(8192, (28672, 28672)), 50 * 2**20) == 2


def test_an_unknown_shape_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="llama-8b"):
        tune.shapes_named("gpt-9")


def test_help_names_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["tune", "--help"])
    text = capsys.readouterr().out
    assert [name for name in tune.SHAPES if name not in text] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_is_used_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", "--shape", "llama-8b"])
    assert caught.value.code == 2
    assert "NVIDIA GPU" in capsys.readouterr().err


@dataclass
class FakeTimer:
    """Likes four splits; knows no tiles for the second shape in long steps."""

    copies: tile_timer.SiteCopies
    num_rows: int
    few: bool

    def prepare(self, candidates: Sequence[Tiles]) -> None:
        pass

    def measure(self, tiles: Tiles) -> float | None:
        if self.copies.shape == Shape(32, (64,)) and self.num_rows > 1024:
            return None
        return (3.0 if tiles.split_k == 4 else 4.0) + (0 if self.few else 10)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune, "Timer", FakeTimer)
    monkeypatch.setattr(tune, "SHAPES", SMALL)
    properties = SimpleNamespace(L2_cache_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")


def run(*arguments: str | Path) -> int:
    """The exit code of ``loramux tune`` for the small shapes."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", "--shape", "small", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.usefixtures("fake_gpu")
def test_the_command_writes_what_was_found_for_each_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    assert run("--rank", 8, "--rank", 100, "--max-loras", 5, "--out", out) == 0
    table = read_table(out)
    assert table.gpu == "Fake GPU"
    assert table.versions["torch"] == torch.__version__
    # Two shapes, two ranks, five buckets and two mixes, but for what has no room.
    assert len(table.entries) == 2 * 2 * 5 * 2 - 4
    assert {entry.key.rank for entry in table.entries} == {"up to 16", "from 65"}
    for entry in table.entries:
        long = entry.key.rows == "from 1024"
        assert entry.tiles.split_k == (1 if long else 4)
        assert entry.measured == (4.0 if long else 3.0) + (0 if entry.key.few else 10)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "no tiles fit" in line]) == 4
    assert "has 36 entries for Fake GPU" in lines[-1]


@pytest.mark.usefixtures("fake_gpu")
def test_slots_for_few_adapters_have_no_entries_for_many(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert run("--rank", 8, "--max-loras", 4, "--out", out) == 0
    assert {entry.key.few for entry in read_table(out).entries} == {True}


@pytest.mark.usefixtures("fake_gpu")
def test_rows_renew_their_bucket_in_a_table_that_is_there(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert run("--rank", 8, "--max-loras", 5, "--out", out) == 0
    first = read_table(out)
    spoilt = replace(first, entries=tuple(replace(e, measured=99.0) for e in first.entries))
    write_table(spoilt, out)
    assert run("--rank", 8, "--max-loras", 5, "--out", out, "--rows", 50) == 0
    renewed = read_table(out)
    assert [e.key for e in renewed.entries] == [e.key for e in first.entries]
    assert {e.key.rows for e in renewed.entries if e.measured != 99.0} == {"up to 64"}
    assert {e.key.rows for e in renewed.entries if e.measured == 99.0} == {*ROW_BUCKETS} - {
        "up to 64"
    }


@pytest.mark.usefixtures("fake_gpu")
def test_an_interrupted_command_keeps_the_shapes_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(key: Key, rank: int, timer: FakeTimer) -> tune.Found:
        if key.shape.in_features == 32:
            raise KeyboardInterrupt
        return found(key, rank, timer)

    found = tune.find_tiles
    monkeypatch.setattr(tune, "find_tiles", interrupted)
    out = tmp_path / "t.json"
    assert run("--rank", 8, "--out", out) != 0
    assert {e.key.shape for e in read_table(out).entries} == {Shape(64, (32, 8))}


@pytest.mark.usefixtures("fake_gpu")
def test_a_table_of_another_gpu_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "t.json"
    assert run("--rank", 8, "--rows", 1, "--out", out) == 0
    before = out.read_text()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Other GPU")
    assert run("--rank", 8, "--rows", 1, "--out", out) == 2
    assert "Other GPU" in capsys.readouterr().err
    assert out.read_text() == before


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("ranks", [("24", "64"), ("128", "512"), ("16", "16")])
def test_ranks_of_one_bucket_are_refused(
    ranks: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", "--shape", "small", "--rank", ranks[0], "--rank", ranks[1]])
    assert caught.value.code == 2
    assert ", ".join(ranks) in capsys.readouterr().err


class EvenTimer(FakeTimer):
    """Likes all tiles alike; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Tiles] = []

    def measure(self, tiles: Tiles) -> float | None:
        self.asked.append(tiles)
        return 1.0


@pytest.mark.parametrize(("few", "block_rows"), [(True, 32), (False, 16)])
def test_the_search_begins_with_the_rule_s_tiles_for_the_bucket(few: bool, block_rows: int) -> None:
    timer = EvenTimer()
    # Rank 24 runs in the bucket of 64.
    found = tune.find_tiles(Key(Shape(4096, (64,)), "up to 128", "up to 64", few), 24, timer)
    assert found.tiles == timer.asked[0] == choose_tiles(4096, block_rows, 64, few=few)


def test_many_adapters_are_measured_row_by_row_and_few_with_one() -> None:
    copies = tile_timer.SiteCopies(Shape(8, (8,)), 8, 6, 1, torch.device("cpu"))
    for num_adapters in (1, 6):
        step = tile_timer.Step(copies, 20, num_adapters)
        slots = step.routing.token_slot.tolist()
        assert slots == [row % num_adapters for row in range(20)]
        # Few count as four; the base makes one segment more, and so do 16 full rows.
        assert step.routing.device_segments.grid == (6 if num_adapters == 1 else 8)


def test_a_table_is_refused_where_no_kernels_run(tiny_base: Path) -> None:
    options = EngineOptions(
        model=ModelOptions(device="cpu"), adapters=AdapterOptions(tuning="t.json")
    )
    with pytest.raises(ConfigError, match="leave --tuning out"):
        LLM(str(tiny_base), options=options)
