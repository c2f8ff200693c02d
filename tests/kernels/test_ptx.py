"""What the compiler makes of the kernels: large tensors come in whole vectors.

Compiling to PTX needs no GPU. A table that loses the alignment of a pointer makes 2-byte loads,
which cost a factor of three to six.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.kernels.compile_ptx import SEGMENTS
from tests.kernels.scripts import said_by

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

MAX_STACK = 256
"""Bytes of local memory of a thread: some numbers that the rarest pass puts aside."""
SMALL_GPU_SHARED = 99 * 1024
"""Shared memory of a block where it is least (an L4, an RTX 4090)."""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The kernels, compiled in a process without the interpreter."""
    names = SITES if request.config.getoption("--all") else SAMPLED
    wanted = {"sites": {name: SITES[name] for name in names}, "ranks": RANKS}
    return said_by("compile_ptx", json.dumps(wanted))


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


EXPERTS = {"experts": 128, "top_k": 8, "hidden": 2048, "size": 768}
"""Of Qwen3-30B-A3B."""
STEPS = [2, 64, 8192]
"""Tokens: so few that each pair is by itself, few for each expert, and many."""


@pytest.fixture(scope="module")
def compiled_experts() -> dict[str, dict[str, Any]]:
    """The kernels of experts by name, tokens of the step and dtype."""
    return said_by("compile_experts", json.dumps(EXPERTS | {"tokens": STEPS, "rank": 16}))


@pytest.mark.parametrize("tokens", STEPS)
@pytest.mark.parametrize("kernel", ["product", "gate", "combine"])
def test_experts_are_never_read_two_bytes_at_a_time(
    compiled_experts: dict[str, dict[str, Any]], kernel: str, tokens: int
) -> None:
    text = compiled_experts[f"{kernel} {tokens} bf16"]["ptx"]
    narrow = 0
    if kernel == "gate":
        narrow = 2  # gains of gate and up, one of DoRA's for each thread
    if kernel != "product" and tokens < STEPS[-1]:
        narrow = 2 * EXPERTS["top_k"]  # what the base made, a column for each thread
    assert len(NARROW.findall(text)) <= narrow
    assert not NARROW_COPY.findall(text)
    assert len(SCALAR.findall(text)) <= MAX_SCALARS
    assert WIDE.search(text)


def test_the_experts_tiles_fit_a_small_gpu_even_in_float32(
    compiled_experts: dict[str, dict[str, Any]],
) -> None:
    assert max(found["shared"] for found in compiled_experts.values()) <= SMALL_GPU_SHARED


@pytest.fixture(scope="module")
def compiled_sampling() -> dict[str, Any]:
    """The sampling kernel by the type of its scores, for Llama 3's vocabulary."""
    return said_by("compile_sampling", "128256")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_draws_read_whole_vectors_and_keep_what_they_hold_in_registers(
    compiled_sampling: dict[str, Any], dtype: str
) -> None:
    found = compiled_sampling[dtype]
    assert not NARROW.findall(found["ptx"])
    assert WIDE.search(found["ptx"])
    assert found["stack"] <= MAX_STACK
    assert found["shared"] <= SMALL_GPU_SHARED


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_of_a_draw_are_computed_in_float64(
    compiled_sampling: dict[str, Any], dtype: str
) -> None:
    assert "ex2.approx" not in compiled_sampling[dtype]["ptx"]
    assert "cvt.rzi.s64.f64" in compiled_sampling[dtype]["ptx"]
