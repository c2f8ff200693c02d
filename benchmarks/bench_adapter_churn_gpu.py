"""What does it cost to serve more adapters than there are slots, on a GPU?

A Llama-3.1-8B shape with random weights, and adapters whose copies are all in pinned host memory.
First what the first use of an adapter that has no slot adds to the first token, beside the same
request once more; then traces (``traces.py``) over many adapters and few slots, played in real time
through the engine's thread: how long steps take, and how fast the copies into slots are.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.churn import (
    Figures,
    Meter,
    Player,
    engine_over,
    first_token_seconds,
    request_for,
    rounded,
    show,
)
from benchmarks.gpu_models import adapter_bytes, add_adapters, llama_engine
from benchmarks.report import finish
from benchmarks.traces import Lengths, draw_trace
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.build import Parts
from loramux.lora.lanes import CudaLane

_FIRST_USE_PROMPT = 64
_BUSY = 16
"""Sequences of the base that run beside, where the first use of adapters is measured busy."""
_BUSY_TOKENS = 4000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--first-uses", type=int, default=100)
    parser.add_argument("--rate-per-slot", type=float, default=0.45, help="requests per second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of a trace")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: a Poisson process")
    parser.add_argument("--alpha", type=float, nargs="+", default=[1.0], help="1: uniform")
    parser.add_argument("--lengths", type=int, nargs=2, default=[8, 512], metavar=("LOW", "HIGH"))
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-step-tokens", type=int, default=96)
    parser.add_argument("--device-cache", metavar="SIZE", help="as in loramux serve")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args(argv)
    least = 2 * max(arguments.slots)
    if min(arguments.first_uses, max(arguments.adapters)) < least:
        parser.error(f"give {least} first uses and adapters or more: twice the slots")
    results: dict[str, dict[str, Figures]] = {}
    for num_slots in arguments.slots:
        with copies_timed() as copies:
            found = asyncio.run(measure(num_slots, copies, arguments))
        show(f"{num_slots} slots", found)
        results[f"{num_slots} slots"] = {name: rounded(each) for name, each in found.items()}
        gc.collect()
        torch.cuda.empty_cache()
    finish(
        "adapter_churn_gpu",
        vars(arguments) | {"gpu": torch.cuda.get_device_name()},
        results,
        arguments.out,
    )


async def measure(
    num_slots: int, copies: CopyTimes, arguments: argparse.Namespace
) -> dict[str, Figures]:
    """Everything for one number of slots, with one engine."""
    parts = engine_with(num_slots, arguments)
    engine = engine_over(parts)
    await engine.start()
    try:
        found: dict[str, Figures] = {}
        for running in (0, _BUSY):
            uses = await first_uses(engine, running, arguments)
            found[f"first use, {running} running"] = uses | copies.take()
        player = Player(engine, Meter(parts))
        for num_adapters, alpha in itertools.product(arguments.adapters, arguments.alpha):
            trace = draw_trace(
                rate=arguments.rate_per_slot * num_slots,
                duration=arguments.duration,
                burstiness=arguments.burstiness,
                alpha=alpha,
                num_adapters=num_adapters,
                lengths=Lengths(*arguments.lengths),
                seed=arguments.seed,
            )
            warm_up = [replace(a, at=0.0, output_tokens=8) for a in trace[: 2 * num_slots]]
            await player.play(warm_up)
            copies.take()
            figures = await player.play(trace)
            found[f"{num_adapters} adapters, alpha {alpha}"] = figures | copies.take()
        return found
    finally:
        await engine.stop()


def engine_with(num_slots: int, arguments: argparse.Namespace) -> Parts:
    """With a copy in host memory for each adapter."""
    num_adapters = max(arguments.adapters)
    num_bytes = adapter_bytes(arguments.rank, arguments.layers)
    parts = llama_engine(
        layers=arguments.layers,
        max_loras=num_slots,
        max_num_seqs=arguments.max_num_seqs,
        max_step_tokens=arguments.max_step_tokens,
        device_cache=arguments.device_cache,
        host_cache=str(num_adapters * num_bytes),
    )
    add_adapters(parts, [str(index) for index in range(num_adapters)], [arguments.rank])
    assert {info.num_bytes for info in parts.core.adapters.infos()} == {num_bytes}
    return parts


async def first_uses(
    engine: AsyncEngine, num_running: int, arguments: argparse.Namespace
) -> Figures:
    """What an adapter without a slot adds to the first token, in turns with one that has one."""
    num_adapters = max(arguments.adapters)
    busy = [
        await engine.submit(request_for(engine.base_name, _FIRST_USE_PROMPT, _BUSY_TOKENS))
        for _ in range(num_running)
    ]
    await asyncio.sleep(0.5 if busy else 0.0)
    loads = (await engine.stats()).slot_loads
    first, again = [], []
    for index in range(arguments.first_uses):
        name = str(index % num_adapters)
        first.append(await ask(engine, name))
        again.append(await ask(engine, name))
    assert (await engine.stats()).slot_loads - loads == arguments.first_uses, (
        "an adapter had a slot"
    )
    assert (await engine.stats()).num_running == num_running, "the others have not run all the time"
    for stream in busy:
        stream.abort()
    while (await engine.stats()).num_running:
        await asyncio.sleep(0.01)
    added = [1000 * (one - other) for one, other in zip(first, again, strict=True)]
    return {
        "first token p50, s": statistics.median(first),
        "first token of who has a slot p50, s": statistics.median(again),
        "added p50, ms": statistics.median(added),
        "added p90, ms": float(np.quantile(added, 0.9)),
    }


async def ask(engine: AsyncEngine, name: str) -> float:
    """Seconds to the first token."""
    due = time.perf_counter()
    return await first_token_seconds(engine, request_for(name, _FIRST_USE_PROMPT, 1), due)


class CopyTimes:
    """Of the copies into slots, by events on their stream."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []

    def note(self, start: torch.cuda.Event, end: torch.cuda.Event, num_bytes: int) -> None:
        self._copies.append((start, end, num_bytes))

    def take(self) -> Figures:
        """Of those since the last call."""
        torch.cuda.synchronize()
        rates = [size / start.elapsed_time(end) / 1e6 for start, end, size in self._copies]
        self._copies.clear()
        return {"copies": len(rates), "copy p50, GB/s": statistics.median(rates or [0])}


@contextmanager
def copies_timed() -> Iterator[CopyTimes]:
    """Notes every copy that a ``CudaLane`` is asked for."""
    times, copy = CopyTimes(), CudaLane.copy

    def timed(lane: CudaLane, target: Tensor, source: Tensor) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with lane.current():
            start.record()
            copy(lane, target, source)
            end.record()
        times.note(start, end, source.nbytes)

    CudaLane.copy = timed
    try:
        yield times
    finally:
        CudaLane.copy = copy


if __name__ == "__main__":
    main()
