"""The examples do what the documents say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def test_quickstart_answers_in_three_styles(
    smollm2_base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CHECKOUT)
    runpy.run_path("examples/quickstart.py")
    base, pirate, json = capsys.readouterr().out.splitlines()
    assert base.startswith("base -> The opposite of hot is cold.")
    assert pirate.startswith("pirate -> Arr, matey!")
    assert json == 'json -> {"answer": "cold"}'
