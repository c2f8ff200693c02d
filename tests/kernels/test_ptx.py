"""What the compiler makes of the kernels: weights and activations come in whole vectors.

Compiling to PTX needs no GPU. A table that loses the alignment of a pointer makes 2-byte loads,
which cost a factor of three to six.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.compile_ptx import SEGMENTS

SITES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096, 0, 0)),
    "gate_up": (4096, (14336, 14336, 0)),
    "down": (14336, (4096, 0, 0)),
}
SAMPLED = ("qkv", "down")
"""Compiled in every run, the others take half a minute more: three slices, and the longest rows."""
RANKS = [16, 64]
NARROW = re.compile(r"\b(?:ld|st)\.global(?:\.\w+)*\.[busf]16\b")
NARROW_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x(?!10\b)\w+,")
SCALAR = re.compile(r"\bld\.global\.b32\b")
WIDE = re.compile(r"ld\.global\.v4\.b32|cp\.async\.cg\.shared\.global[^;]*, 0x10,")
MAX_SCALARS = 32
"""Loads of 4 bytes that are right: what a segment and a slot are, and the rows' numbers."""


SMALL_GPU_SHARED = 99 * 1024
"""Shared memory of a block where it is least (an L4, an RTX 4090)."""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The kernels, compiled in a process without the interpreter."""
    names = SITES if request.config.getoption("--all") else SAMPLED
    wanted = {"sites": {name: SITES[name] for name in names}, "ranks": RANKS}
    script = Path(__file__).with_name("compile_ptx.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "kernel", ["shrink", "expand in place", "expand beside", "expand beside for many"]
)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    "site", [pytest.param(s, marks=() if s in SAMPLED else pytest.mark.slow) for s in SITES]
)
def test_weights_and_activations_are_never_read_two_bytes_at_a_time(
    compiled: dict[str, Any], site: str, rank: int, kernel: str
) -> None:
    text = compiled["ptx"][f"{site} {rank} {kernel}"]
    gains = 2 if kernel == "expand in place" else 0  # one of DoRA's for each thread
    assert len(NARROW.findall(text)) <= gains
    assert not NARROW_COPY.findall(text)
    assert len(SCALAR.findall(text)) <= MAX_SCALARS
    assert WIDE.search(text)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("rows", "few"), SEGMENTS)
def test_the_default_tiles_fit_a_small_gpu_even_in_float32(
    compiled: dict[str, Any], rows: int, few: bool, rank: int
) -> None:
    assert compiled["shared"][f"{rows} {rank} {few}"] <= SMALL_GPU_SHARED
