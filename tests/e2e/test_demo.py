"""``loramux demo`` as a person runs it, without a terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_shows_a_style_for_each_adapter_in_one_batch(smollm2_base: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "loramux", "demo", "--max-tokens=24"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *answers, summary = result.stdout.strip().splitlines()
    for style in ("Arr, matey!", '{"answer"', "¡Claro que sí"):
        assert any(style in line for line in answers)
    assert any(line.startswith("[base]") for line in answers)
    assert "21 requests" in summary
    assert "6 + base" in summary
