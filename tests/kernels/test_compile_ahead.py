"""Kernels are compiled before the first step, in other processes where the cache lacks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.scripts import said_by


@pytest.mark.timeout(300)
def test_processes_compile_what_no_start_before_has(tmp_path: Path) -> None:
    first, second = (said_by("compile_ahead", TRITON_CACHE_DIR=str(tmp_path)) for _ in range(2))
    # The first kernel shows that there is no cache; all others are taken from the processes.
    assert first["at_start"].count(False) == 1
    assert first["at_start"].count(True) > 10
    assert first["processes"] > 0
    assert sorted(second["at_start"]) == [True] * len(first["at_start"])
    assert second["processes"] == 0
    assert first["later"] == second["later"] == [], "a step would have waited for a compiler"


@pytest.mark.timeout(300)
def test_without_processes_everything_is_compiled_all_the_same(tmp_path: Path) -> None:
    found = said_by("compile_ahead", "broken", TRITON_CACHE_DIR=str(tmp_path))
    assert found["processes"] > 0
    assert found["at_start"].count(False) > 10
    assert found["later"] == []
