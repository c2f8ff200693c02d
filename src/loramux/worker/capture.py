"""Captures what is launched into a CUDA graph, and times replays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UP_SECONDS = 0.02
"""The GPU's clocks fall while the host compiles."""


def rehearse(run: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run once on the stream of the capture, for what is made at a first call."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)


def capture(
    run: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """The launches of ``run``, which must have run before; ``pool`` is shared with other graphs."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not by torch.cuda.graph, which collects garbage each time: that takes longer than this.
    with torch.cuda.stream(stream):
        # Other threads may use CUDA meanwhile: one that reads an adapter pins memory for it.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        run()
        graph.capture_end()
    return graph


def replay_microseconds(graph: torch.cuda.CUDAGraph, replays: int = 9) -> float:
    """The median of some replays, once the clocks are up."""
    _warm_up(graph)
    return statistics.median(_replay(graph) for _ in range(replays))


def added_microseconds(
    graph: torch.cuda.CUDAGraph, base: torch.cuda.CUDAGraph, replays: int = 9
) -> float:
    """What a graph takes longer than another: the median over replays in turns.

    So the two are compared at the same clocks, which move with the GPU's heat.
    """
    _warm_up(graph)
    return statistics.median(_replay(graph) - _replay(base) for _ in range(replays))


def _warm_up(graph: torch.cuda.CUDAGraph) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_SECONDS:
        graph.replay()
        torch.cuda.synchronize()


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000
