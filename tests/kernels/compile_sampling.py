"""Compiles the sampling kernel and prints what tests want to know as JSON; see test_ptx.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.ops.sampling_kernel import BLOCK, NUM_WARPS, ROOM, draw_kernel
from loramux.worker.filters import weight_unit

TYPES = {
    "scores": "*bf16", "best": "*fp32", "draws": "*fp64", "noted_keys": "*i32",
    "noted_ids": "*i32", "token_ids": "*i64", "stride": "i32",
}  # fmt: skip
"""All are multiples of 16, the stride too: vocabularies are."""


def compile_draw(dtype: str, vocab: int) -> dict[str, object]:
    names = draw_kernel.arg_names
    constants = {
        "VOCAB": vocab, "CHUNKS": triton.next_power_of_2(triton.cdiv(vocab, BLOCK)),
        "UNIT": weight_unit(vocab), "BLOCK": BLOCK, "ROOM": ROOM,
    }  # fmt: skip
    source = ASTSource(
        fn=draw_kernel,
        signature={
            n: "constexpr" if n in constants else TYPES[n].replace("bf16", dtype) for n in names
        },
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in TYPES},
    )
    options = {"num_warps": NUM_WARPS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "ptx": compiled.asm["ptx"],
        "shared": compiled.metadata.shared,
        "stack": _stack(compiled.asm["cubin"]),
    }


def _stack(cubin: bytes) -> int:
    """Bytes of a thread's local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    return sum(int(n) for n in re.findall(r"\b(?:STACK|LOCAL):(\d+)", done.stdout))


if __name__ == "__main__":
    print(json.dumps({dtype: compile_draw(dtype, int(sys.argv[1])) for dtype in ("bf16", "fp32")}))
