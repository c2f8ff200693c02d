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

import pytest

SITES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096, 0, 0)),
    "gate_up": (4096, (14336, 14336, 0)),
    "down": (14336, (4096, 0, 0)),
}
NARROW = re.compile(r"\b(?:ld|st)\.global(?:\.\w+)*\.[busf]16\b")
NARROW_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x(?!10\b)\w+,")
SCALAR = re.compile(r"\bld\.global\.b32\b")
WIDE = re.compile(r"ld\.global\.v4\.b32|cp\.async\.cg\.shared\.global[^;]*, 0x10,")
MAX_SCALARS = 32
"""Loads of 4 bytes that are right: what a segment and a slot are, and the rows' numbers."""


def ptx(site: str, rank: int, *, beside: bool) -> dict[str, str]:
    """PTX of both kernels, compiled in a process without the interpreter."""
    inputs, sizes = SITES[site]
    arguments = json.dumps({"inputs": inputs, "sizes": sizes, "rank": rank, "beside": beside})
    script = Path(__file__).with_name("compile_ptx.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), arguments],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("site", SITES)
def test_weights_and_activations_are_never_read_two_bytes_at_a_time(
    site: str, rank: int, beside: bool
) -> None:
    for name, text in ptx(site, rank, beside=beside).items():
        gains = 2 if name == "expand" and not beside else 0  # one of DoRA's for each thread
        assert len(NARROW.findall(text)) <= gains, name
        assert not NARROW_COPY.findall(text), name
        assert len(SCALAR.findall(text)) <= MAX_SCALARS, name
        assert WIDE.search(text), name
