"""``loramux tune`` up to the clock, which needs a GPU (``tests/kernels/test_tune_on_gpu.py``)."""

from __future__ import annotations

from dataclasses import dataclass
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
from loramux.ops.tuning import ROW_BUCKETS, Measured, Shape, read_table
from loramux.testing import tiny_model
from loramux.worker import tune

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
    assert tune.copies_for(shape, 50 * 2**20) * shape.in_features * 4096 * 2 >= 4 * 50 * 2**20
    assert tune.copies_for(Shape(8192, (28672, 28672)), 50 * 2**20) == 2


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

    copies: tune.SiteCopies
    num_rows: int

    def measure(self, tiles: Tiles) -> Measured | None:
        if self.copies.shape == Shape(32, (64,)) and self.num_rows > 1024:
            return None
        return Measured(1.0, 3.0 if tiles.split_k == 4 else 4.0)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "require_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune, "Timer", FakeTimer)
    monkeypatch.setattr(tune, "SHAPES", SMALL)
    properties = SimpleNamespace(L2_cache_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")


@pytest.mark.usefixtures("fake_gpu")
def test_the_command_writes_what_was_found_for_each_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    arguments = ["tune", "--shape", "small", "--rank", "8", "--rank", "100", "--max-loras", "2"]
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--out", str(out)])
    assert caught.value.code == 0
    table = read_table(out)
    assert table.gpu == "Fake GPU"
    assert table.versions["torch"] == torch.__version__
    # Two shapes, two ranks and four buckets, but for what has no room.
    assert len(table.entries) == 2 * 2 * 4 - 2
    assert {entry.key.rank for entry in table.entries} == {"up to 16", "from 65"}
    for entry in table.entries:
        long = entry.key.rows == "from 1024"
        assert entry.tiles.split_k == (1 if long else 4)
        assert entry.measured == Measured(1.0, 4.0 if long else 3.0)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "no tiles fit" in line]) == 2
    assert "wrote 14 entries for Fake GPU" in lines[-1]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("ranks", [("24", "64"), ("128", "512"), ("16", "16")])
def test_ranks_of_one_bucket_are_refused(
    ranks: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["tune", "--shape", "small", "--rank", ranks[0], "--rank", ranks[1]])
    assert caught.value.code == 2
    assert ", ".join(ranks) in capsys.readouterr().err


def test_the_search_begins_with_the_rule_s_tiles_for_the_bucket() -> None:
    asked: list[Tiles] = []

    def measure(tiles: Tiles) -> Measured:
        asked.append(tiles)
        return Measured(1.0, 1.0)

    # Rank 24 runs in the bucket of 64.
    found = tune.find_tiles(Shape(4096, (64,)), 24, 128, measure)
    assert found.tiles == asked[0] == choose_tiles(4096, 16, 64)


def test_a_table_is_refused_where_no_kernels_run(tiny_base: Path) -> None:
    options = EngineOptions(
        model=ModelOptions(device="cpu"), adapters=AdapterOptions(tuning="t.json")
    )
    with pytest.raises(ConfigError, match="leave --tuning out"):
        LLM(str(tiny_base), options=options)
