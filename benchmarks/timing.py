"""One GPU timer: launches captured in a CUDA graph, the median of many replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from loramux.worker.capture import capture, rehearse, replay_microseconds


def graph_microseconds(calls: Sequence[Callable[[], object]], *, replays: int = 11) -> float:
    """Microseconds of one call, when all ``calls`` follow one another in a CUDA graph.

    Several calls over different data keep the second from finding the first one's in the cache.
    """

    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream()
    rehearse(run, stream)
    return replay_microseconds(capture(run, stream), replays) / len(calls)
