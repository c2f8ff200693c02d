"""Benchmarks run, with settings so small that their figures mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import bench_adapter_churn


def test_adapter_churn(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    bench_adapter_churn.main(
        [
            *("--base", str(tiny_base), "--dtype", "float32", "--out", str(out)),
            *("--adapters", "2", "6", "--slots", "2", "--host-share", "0.5", "--rank", "2"),
            *("--rate", "100", "--duration", "0.3", "--lengths", "2", "6", "--repeats", "1"),
            *("--threads", str(torch.get_num_threads())),
        ]
    )

    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(out.read_text(encoding="utf-8"))
    few, many = record["results"]["2 adapters"], record["results"]["6 adapters"]
    assert list(few) == ["all resident"]
    assert list(many) == ["all resident", "2 slots", "2 slots, 3 host copies"]
    assert many["all resident"]["slot evictions"] == 0
    assert many["2 slots"]["slot evictions"] > 0
    assert many["2 slots"]["slot hits"] < many["all resident"]["slot hits"] <= 1
    assert many["2 slots"]["host hits"] == 1
    assert many["2 slots, 3 host copies"]["host hits"] < 1
    assert many["2 slots, 3 host copies"]["host evictions"] > 0
    assert all(figures["output tokens/s"] > 0 for figures in many.values())
