"""Compiles the experts' kernels and prints what tests want to know as JSON; run by test_ptx.py."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import triton.language as tl

from loramux.ops.expert_kernels import gate_runs_kernel, product_kernel
from loramux.ops.expert_pair_kernels import combine_kernel, gate_kernel
from loramux.ops.expert_routing_kernels import (
    cut_kernel,
    rank_kernel,
    sort_kernel,
    split_kernel,
)
from loramux.ops.expert_tiles import (
    BLOCK_RANKS,
    COMBINE_COLUMNS,
    GATE_COLUMNS,
    added_by_pair,
    expert_lora_tiles,
    product_tiles,
    run_rows,
    stand_alone,
)
from loramux.ops.layout import ALIGN_BYTES
from tests.kernels.compile_ptx import TYPES, compile_kernel

EXPERT_TYPES = TYPES | {
    "index": "*i64", "token_slot": "*i32", "token_count": "*i32", "order": "*i32", "keys": "*i32",
    "starts": "*i32", "tokens": "*i32", "pieces": "*i32", "by_pair": "*i32", "piece_expert": "*i32",
    "piece_run": "*i32", "piece_start": "*i32", "piece_rows": "*i32", "num_pairs": "i32",
    "most_pairs": "i32", "num_columns": "i32", "capacity": "i32", "rows": "i32", "run_rows": "i32",
    "weight": "*bf16", "both": "*bf16", "hidden": "*bf16", "out": "*bf16", "weights": "*fp32",
}  # fmt: skip
DTYPES = {"bf16": (tl.bfloat16, 2, 90), "fp32": (tl.float32, 4, 89)}
"""By name: the type of products, bytes of a number, and the GPU: float32 is compiled for a small
one, whose shared memory is least."""
ALIGNED = (
    "x", "y", "weight", "both", "hidden", "out", "arena", "planes", "x_stride", "plane_rows",
    "plane_ranks",
)  # fmt: skip


def compiled(
    kernel: Any, constants: dict[str, Any], warps: int, stages: int, dtype: str, *,
    alone: bool = False,
) -> Any:  # fmt: skip
    """``alone``: what says which expert a piece is of is the router's own int64."""
    types = EXPERT_TYPES | ({"piece_expert": "*i64"} if alone else {})
    return compile_kernel(
        kernel, constants, warps, stages, capability=DTYPES[dtype][2], dtype=dtype, types=types,
        aligned=ALIGNED,
    )  # fmt: skip


def layer_kernels(
    dtype: str, pairs: int, experts: int, top_k: int, hidden: int, size: int, rank: int
) -> dict[str, Any]:
    """Those of one layer that read much, as ``TritonExperts`` launches them."""
    dot, width, _ = DTYPES[dtype]
    tiles, rows = product_tiles(pairs, experts, width), run_rows(pairs, experts, few=True)
    lora = expert_lora_tiles(hidden, pairs, rank, rows)
    alone, by_pair = stand_alone(pairs), added_by_pair(pairs, experts, few=True)
    products = {"DOT": dot, "PRECISION": "ieee"}
    product = products | {
        "N": 2 * size, "K": hidden, "TOP_K": top_k, "PAIRS_PER_ROW": top_k, "ALONE": alone,
        "BLOCK_M": tiles.block_rows, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
    }  # fmt: skip
    delta = {"UNIT": ALIGN_BYTES // width, "SPLIT_K": lora.split_k}
    pairwise = delta | {
        "TOP_K": top_k, "LORA": by_pair, "BLOCK_R": BLOCK_RANKS, "ONE_BLOCK": True,
    }  # fmt: skip
    gate = {"SIZE": size, "ACTIVATION": "silu"}
    if by_pair:
        gate |= pairwise | {"BLOCK_M": 1, "BLOCK_N": GATE_COLUMNS}
    else:
        gate |= delta | products | {"BLOCK_M": rows, "BLOCK_N": 128, "BLOCK_R": lora.expand_ranks}
    combine = pairwise | {
        "SIZE": hidden, "BLOCK_N": COMBINE_COLUMNS if by_pair else 1024,
    }  # fmt: skip
    return {
        "product": compiled(product_kernel, product, tiles.warps, tiles.stages, dtype, alone=alone),
        "gate": compiled(gate_kernel if by_pair else gate_runs_kernel, gate, 4, 1, dtype),
        "combine": compiled(combine_kernel, combine, 4, 1, dtype),
    }


def main(tokens: list[int], top_k: int, **sizes: int) -> None:
    """For each number of tokens and dtype: PTX of the kernels that read much, and shared memory."""
    found: dict[str, dict[str, Any]] = {}
    for count, dtype in itertools.product(tokens, DTYPES):
        kernels = layer_kernels(dtype, count * top_k, top_k=top_k, **sizes)
        for name, kernel in kernels.items():
            found[f"{name} {count} {dtype}"] = {
                "ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared
            }  # fmt: skip
    sorting = {"TOP_K": top_k, "HAS_SLOTS": True}
    compiled(sort_kernel, sorting | {"BLOCK": 128}, 8, 1, "bf16")
    compiled(rank_kernel, sorting | {"BLOCK": 32, "CHUNK": 256}, 4, 1, "bf16")
    compiled(cut_kernel, {"TOP_K": top_k, "BY_SLOT": True, "CHUNK": 4096}, 16, 1, "bf16")
    compiled(split_kernel, {"TOP_K": top_k, "BLOCK": 32}, 1, 1, "bf16")
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
