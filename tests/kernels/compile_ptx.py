"""Compiles both LoRA kernels for an H200 and prints their PTX as JSON; run by test_ptx.py."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.ops.interface import SHORT_ROWS
from loramux.ops.layout import pad
from loramux.ops.triton_kernels import expand_kernel, shrink_kernel
from loramux.ops.triton_lora import Tiles, choose_tiles

TYPES = {
    "x": "*bf16", "y": "*bf16", "arena": "*bf16", "bias": "*bf16", "planes": "*fp32",
    "table": "*i64",
    "segment_slot": "*i32", "segment_start": "*i32", "segment_rows": "*i32", "sorted_rows": "*i32",
    "x_stride": "i32", "y_stride": "i32", "table_stride": "i32", "plane_rows": "i32",
    "plane_ranks": "i32",
}  # fmt: skip
ALIGNED = ("x", "y", "arena", "planes", "bias", "x_stride", "y_stride", "plane_rows", "plane_ranks")
"""What is a multiple of 16 in every launch."""


def compile_kernel(kernel: Any, constants: dict[str, Any], warps: int, stages: int) -> str:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else TYPES[n] for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ALIGNED},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def shrink_ptx(inputs: int, sizes: list[int], rank: int) -> str:
    tiles = choose_tiles(inputs, SHORT_ROWS, rank)
    constants = _common(sizes, tiles) | {
        "K": inputs, "K_PAD": pad(inputs), "BLOCK_R": tiles.shrink_ranks, "BLOCK_K": tiles.block_k,
    }  # fmt: skip
    return compile_kernel(shrink_kernel, constants, tiles.shrink_warps, tiles.shrink_stages)


def expand_ptx(inputs: int, sizes: list[int], rank: int, *, beside: bool) -> str:
    tiles = choose_tiles(inputs, SHORT_ROWS, rank)
    constants = _common(sizes, tiles) | {
        "N0": sizes[0], "N1": sizes[1], "N2": sizes[2], "BLOCK_N": tiles.block_n,
        "BLOCK_R": tiles.expand_ranks, "HAS_BIAS": False, "BESIDE": beside,
        "TILES": tiles.expand_tiles, "ONE_BLOCK": rank <= tiles.expand_ranks,
    }  # fmt: skip
    return compile_kernel(expand_kernel, constants, tiles.expand_warps, tiles.expand_stages)


def _common(sizes: list[int], tiles: Tiles) -> dict[str, Any]:
    return {
        "NUM_SLICES": sum(size > 0 for size in sizes), "UNIT": 8, "SPLIT_K": tiles.split_k,
        "BLOCK_M": 16, "DOT": tl.bfloat16, "PRECISION": "ieee",
    }  # fmt: skip


def main(sites: dict[str, tuple[int, list[int]]], ranks: list[int]) -> None:
    """PTX by site, rank and kernel."""
    found: dict[str, str] = {}
    for (name, (inputs, sizes)), rank in itertools.product(sites.items(), ranks):
        found[f"{name} {rank} shrink"] = shrink_ptx(inputs, sizes, rank)
        for form, beside in (("in place", False), ("beside", True)):
            found[f"{name} {rank} expand {form}"] = expand_ptx(inputs, sizes, rank, beside=beside)
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
