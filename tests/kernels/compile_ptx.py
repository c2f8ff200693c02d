"""Compiles both LoRA kernels and prints what tests want to know as JSON; run by test_ptx.py."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loramux.ops.layout import pad
from loramux.ops.tiles import LONG_ROWS, MIDDLE_ROWS, SHORT_ROWS, Tiles, choose_tiles
from loramux.ops.triton_kernels import expand_kernel, shrink_kernel

TYPES = {
    "x": "*bf16", "y": "*bf16", "arena": "*bf16", "bias": "*bf16", "planes": "*fp32",
    "table": "*i64",
    "segment_slot": "*i32", "segment_start": "*i32", "segment_rows": "*i32", "sorted_rows": "*i32",
    "x_stride": "i32", "y_stride": "i32", "table_stride": "i32", "plane_rows": "i32",
    "plane_ranks": "i32",
}  # fmt: skip
ALIGNED = ("x", "y", "arena", "planes", "bias", "x_stride", "y_stride", "plane_rows", "plane_ranks")
"""What is a multiple of 16 in every launch."""
SEGMENTS = ((SHORT_ROWS, True), (SHORT_ROWS, False), (MIDDLE_ROWS, True), (LONG_ROWS, True))
"""Rows of a segment, and whether the adapters are few; long ones have the same tiles for many."""


def compile_kernel(
    kernel: Any,
    constants: dict[str, Any],
    warps: int,
    stages: int,
    *,
    capability: int = 90,
    dtype: str = "bf16",
    types: Mapping[str, str] = TYPES,
    aligned: Sequence[str] = ALIGNED,
) -> Any:
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={
            n: "constexpr" if n in constants else types[n].replace("bf16", dtype) for n in names
        },
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def shrink_ptx(inputs: int, sizes: list[int], rank: int) -> str:
    tiles = choose_tiles(inputs, SHORT_ROWS, rank, few=True)  # the same for many
    constants = _common(sizes, tiles) | {
        "K": inputs, "K_PAD": pad(inputs), "BLOCK_R": tiles.shrink_ranks, "BLOCK_K": tiles.block_k,
    }  # fmt: skip
    kernel = compile_kernel(shrink_kernel, constants, tiles.shrink_warps, tiles.shrink_stages)
    return kernel.asm["ptx"]


def expand_ptx(inputs: int, sizes: list[int], rank: int, *, beside: bool, few: bool) -> str:
    tiles = choose_tiles(inputs, SHORT_ROWS, rank, few=few)
    constants = _expand_constants(sizes, rank, tiles) | {"BESIDE": beside}
    kernel = compile_kernel(expand_kernel, constants, tiles.expand_warps, tiles.expand_stages)
    return kernel.asm["ptx"]


def shared_bytes(inputs: int, rows: int, rank: int, *, few: bool) -> int:
    """Most shared memory of a block by the default rule, in float32 on a small GPU."""
    tiles, sizes = choose_tiles(inputs, rows, rank, few=few), [inputs, 0, 0]
    wide = {"UNIT": 4, "BLOCK_M": rows, "DOT": tl.float32}
    constants = {
        "K": inputs, "K_PAD": pad(inputs), "BLOCK_R": tiles.shrink_ranks, "BLOCK_K": tiles.block_k,
    }  # fmt: skip
    shrink = compile_kernel(
        shrink_kernel, _common(sizes, tiles) | constants | wide,
        tiles.shrink_warps, tiles.shrink_stages, capability=89, dtype="fp32",
    )  # fmt: skip
    expand = compile_kernel(
        expand_kernel, _expand_constants(sizes, rank, tiles) | {"BESIDE": True} | wide,
        tiles.expand_warps, tiles.expand_stages, capability=89, dtype="fp32",
    )  # fmt: skip
    return max(shrink.metadata.shared, expand.metadata.shared)


def _expand_constants(sizes: list[int], rank: int, tiles: Tiles) -> dict[str, Any]:
    return _common(sizes, tiles) | {
        "N0": sizes[0], "N1": sizes[1], "N2": sizes[2], "BLOCK_N": tiles.block_n,
        "BLOCK_R": tiles.expand_ranks, "HAS_BIAS": False, "TILES": tiles.expand_tiles,
        "ONE_BLOCK": rank <= tiles.expand_ranks,
    }  # fmt: skip


def _common(sizes: list[int], tiles: Tiles) -> dict[str, Any]:
    return {
        "NUM_SLICES": sum(size > 0 for size in sizes), "UNIT": 8, "SPLIT_K": tiles.split_k,
        "BLOCK_M": 16, "DOT": tl.bfloat16, "PRECISION": "ieee",
    }  # fmt: skip


def main(sites: dict[str, tuple[int, list[int]]], ranks: list[int]) -> None:
    """PTX by site, rank and kernel, and shared memory by rows of a segment, rank and mix."""
    found: dict[str, str] = {}
    for (name, (inputs, sizes)), rank in itertools.product(sites.items(), ranks):
        found[f"{name} {rank} shrink"] = shrink_ptx(inputs, sizes, rank)
        for form, beside, few in (
            ("in place", False, True),
            ("beside", True, True),
            ("beside for many", True, False),
        ):
            text = expand_ptx(inputs, sizes, rank, beside=beside, few=few)
            found[f"{name} {rank} expand {form}"] = text
    shared = {
        f"{rows} {rank} {few}": shared_bytes(4096, rows, rank, few=few)
        for rows, few in SEGMENTS
        for rank in ranks
    }
    print(json.dumps({"ptx": found, "shared": shared}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
