"""Compiles the experts' kernels and prints what tests want to know as JSON; run by test_ptx.py."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import triton.language as tl

from loramux.ops.expert_kernels import (
    combine_kernel,
    cut_kernel,
    gate_kernel,
    product_kernel,
    rank_kernel,
)
from loramux.ops.expert_tiles import expert_lora_tiles, product_tiles, run_rows
from loramux.ops.layout import ALIGN_BYTES
from tests.kernels.compile_ptx import TYPES, compile_kernel

EXPERT_TYPES = TYPES | {
    "index": "*i64", "token_slot": "*i32", "order": "*i32", "tokens": "*i32", "found": "*i32",
    "pieces": "*i32", "piece_expert": "*i32", "piece_run": "*i32", "piece_start": "*i32",
    "piece_rows": "*i32", "num_pairs": "i32", "num_columns": "i32", "capacity": "i32",
    "expert_rows": "i32", "run_rows": "i32",
    "weight": "*bf16", "both": "*bf16", "hidden": "*bf16", "out": "*bf16", "weights": "*fp32",
}  # fmt: skip
DTYPES = {"bf16": (tl.bfloat16, 2, 90), "fp32": (tl.float32, 4, 89)}
"""By name: the type of products, bytes of a number, and the GPU: float32 is compiled for a small
one, whose shared memory is least."""


def compiled(kernel: Any, constants: dict[str, Any], warps: int, stages: int, dtype: str) -> Any:
    return compile_kernel(
        kernel, constants, warps, stages, capability=DTYPES[dtype][2], dtype=dtype,
        types=EXPERT_TYPES, aligned=("x", "y", "weight", "both", "hidden", "out", "arena", "planes",
                                     "x_stride", "plane_rows", "plane_ranks"),
    )  # fmt: skip


def main(experts: int, top_k: int, hidden: int, size: int, tokens: list[int], rank: int) -> None:
    """For each number of tokens and dtype: PTX of the kernels that read much, and shared memory."""
    found: dict[str, dict[str, Any]] = {}
    for count, dtype in itertools.product(tokens, DTYPES):
        dot, width, _ = DTYPES[dtype]
        pairs = count * top_k
        common = {"DOT": dot, "PRECISION": "ieee"}
        tiles = product_tiles(pairs, experts, width)
        product = {
            "N": 2 * size, "K": hidden, "PAIRS_PER_ROW": top_k, "BLOCK_M": tiles.block_rows,
            "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
        }  # fmt: skip
        rows = run_rows(pairs, experts, few=True)
        lora = expert_lora_tiles(hidden, pairs, rank, rows)
        gate = {
            "SIZE": size, "ACTIVATION": "silu", "LORA": True, "UNIT": ALIGN_BYTES // width,
            "SPLIT_K": lora.split_k, "BLOCK_M": rows, "BLOCK_N": 128, "BLOCK_R": lora.expand_ranks,
        }  # fmt: skip
        kernels = {
            "product": compiled(product_kernel, common | product, tiles.warps, tiles.stages, dtype),
            "gate": compiled(gate_kernel, common | gate, 4, 1, dtype),
            "combine": compiled(
                combine_kernel, {"SIZE": hidden, "TOP_K": top_k, "BLOCK_N": 1024}, 4, 1, dtype
            ),
        }
        for name, kernel in kernels.items():
            found[f"{name} {count} {dtype}"] = {
                "ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared
            }  # fmt: skip
    rank_pairs = {"TOP_K": top_k, "HAS_SLOTS": True, "BLOCK": 32, "CHUNK": 256}
    compiled(rank_kernel, rank_pairs, 4, 3, "bf16")
    compiled(cut_kernel, {"CHUNK": 1024}, 4, 3, "bf16")
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
