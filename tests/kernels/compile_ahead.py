"""Compiles kernels as a start does, for a GPU that is not there, and prints what that took as JSON.

Run by test_compile_ahead.py, with a folder for Triton's cache in the environment; the argument
``broken`` lets no process start.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from loramux.lora.routing import Routing
from loramux.lora.segments import padded_rows
from loramux.lora.slots import SlotTables
from loramux.ops import compile_ahead
from loramux.ops.compile_worker import use_no_device
from loramux.ops.interface import Site, Slice
from loramux.ops.layout import RECORD
from loramux.ops.lora_launches import Launch, compile_kernel, run_kernel
from loramux.ops.triton_lora import TritonOps
from loramux.types import Slot

CPU = torch.device("cpu")
SIZES, FEATURES, ROWS, SLOTS = (64, 32, 32), 128, (4, 100), 6


def main(broken: bool) -> None:
    use_no_device(GPUTarget("cuda", 90, 32))
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)  # type: ignore[attr-defined]
    processes: list[object] = []
    start = compile_ahead._Processes._start

    def noting_start(self: Any) -> Any:
        processes.append(self)
        if broken:
            raise OSError("there are too many processes")
        return start(self)

    compile_ahead._Processes._start = noting_start  # type: ignore[method-assign]
    ops = engine_ops()
    with ops.compiling():
        launch_all(ops)
    at_start = [*hits]
    hits.clear()
    launch_all(engine_ops(compile_kernel))
    print(json.dumps({"at_start": at_start, "processes": len(processes), "later": hits}))


def engine_ops(launch: Launch = run_kernel) -> TritonOps:
    rows = padded_rows(SLOTS, max(ROWS))
    return TritonOps(padded_rows=rows, max_rank=64, device=CPU, launch=launch)


def launch_all(ops: TritonOps) -> None:
    """Steps of few rows and of more, with few adapters and many, of both rank buckets."""
    slices = []
    for module, size in enumerate(SIZES):
        slices.append(Slice(module, sum(SIZES[:module]), size))
    site = Site(tuple(slices), FEATURES, None)
    tables = SlotTables(len(SIZES), SLOTS, CPU)
    arena = torch.zeros(2**12, dtype=torch.bfloat16)
    routing = Routing(SLOTS, max(ROWS), CPU)
    for rows in ROWS:
        x = torch.zeros(rows, FEATURES, dtype=torch.bfloat16)
        y = torch.zeros(rows, sum(SIZES), dtype=torch.bfloat16)
        for few in (True, False):
            routing.fill([Slot(0)], [rows], few=few)
            for rank in (16, 64):
                ops.begin_step(rank, few=few)
                ops.lora_add_(y, x, site, arena, tables, routing)
                ops.lora_delta_(y, x, site, arena, tables, routing)
                launch_experts(ops, x, arena, routing)


def launch_experts(ops: TritonOps, x: Tensor, arena: Tensor, routing: Routing) -> None:
    """A mixture of four, two for each token."""
    choice = torch.zeros(len(x), 2, dtype=torch.int64)
    ops._experts.run_experts(
        x,
        choice,
        choice.to(x.dtype),
        x.new_zeros(4, 64, FEATURES),
        x.new_zeros(4, FEATURES, 32),
        arena,
        torch.zeros(12, SLOTS + 1, RECORD, dtype=torch.int64),
        routing.token_slot,
        routing.token_count,
        "silu",
        lora=True,
    )


if __name__ == "__main__":
    main("broken" in sys.argv)
