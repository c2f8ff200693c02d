"""One GPU timer: launches captured in a CUDA graph, the median of many replays."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_microseconds(calls: Sequence[Callable[[], object]], *, replays: int = 11) -> float:
    """Microseconds of one call, when all ``calls`` follow one another in a CUDA graph.

    Several calls over different data keep the second from finding the first one's in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compile and warm up outside the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[2:]) / len(calls)
