"""Graphs that are not captured at start: which ones, and when."""

from __future__ import annotations

import logging

import torch

from loramux.lora.layers import Form
from loramux.worker.graphs import GraphKey, StepGraphs

log = logging.getLogger(__name__)

PATIENCE = 3
"""The step with which a graph that steps have missed is captured at once: by then they have lost
about as much time as that takes."""

_ROOM = 2**29
"""Bytes of device memory that stay free, whatever graphs there could be."""


class LaterGraphs:
    """Captures graphs after the start.

    Adapters with DoRA or larger ranks make steps possible that have no graph. Such a step runs
    without, a few times as slow, until the graph has been captured: while nothing else is to be
    done, or when enough of them have come.
    """

    def __init__(self, graphs: StepGraphs, num_slots: int, *, step_bytes: int = 0) -> None:
        """``step_bytes``: device memory that the largest step takes and gives back."""
        self._graphs = graphs
        self._num_slots = num_slots
        self._step_bytes = step_bytes
        self._own_bytes = torch.cuda.memory_reserved()
        """Of what torch has of the device, all but what it keeps of steps since the start."""
        self._misses: dict[GraphKey, int] = {}
        """Graphs that are missing, and how many steps have missed them."""
        self._plain: set[int] = set()
        self._with_gain: set[int] = set()
        self._has_warned = False

    def expect(self, rank_bucket: int, *, has_gain: bool) -> None:
        """Adapters of a rank bucket, with DoRA or without, may take part in steps from now on."""
        known = self._with_gain if has_gain else self._plain
        if rank_bucket in known:
            return
        known.add(rank_bucket)
        for form, bucket in self._mixes():
            for key in self._graphs.keys(form, bucket, self._num_slots):
                if key not in self._graphs:
                    self._misses.setdefault(key, 0)

    def _mixes(self) -> list[tuple[Form, int]]:
        """A step is of the largest rank in it, and in place if any of its adapters has DoRA."""
        mixes = [(Form.BESIDE, bucket) for bucket in sorted(self._plain)]
        if self._with_gain:
            buckets, smallest = sorted(self._plain | self._with_gain), min(self._with_gain)
            mixes += [(Form.IN_PLACE, bucket) for bucket in buckets if bucket >= smallest]
        return mixes

    def is_there(self, key: GraphKey) -> bool:
        """Whether a step that comes now has its graph, which may be captured for it."""
        if key in self._graphs:
            return True
        self._misses[key] = self._misses.get(key, 0) + 1
        return self._misses[key] >= PATIENCE and self._capture(key)

    def capture_next(self) -> bool:
        """Capture a graph that is missing, most missed first, then small ones; False without."""
        key = min(self._misses, key=lambda key: (-self._misses[key], key.bucket), default=None)
        return key is not None and self._capture(key)

    def _capture(self, key: GraphKey) -> bool:
        """False where the largest step would not find its memory any more."""
        reserved = torch.cuda.memory_reserved()
        kept_of_steps = reserved - self._own_bytes
        if torch.cuda.mem_get_info()[0] < max(self._step_bytes - kept_of_steps, 0) + _ROOM:
            self._warn()
            return False
        self._graphs.capture(key)
        self._own_bytes += torch.cuda.memory_reserved() - reserved
        del self._misses[key]
        return True

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the GPU has no memory for more graphs: steps of DoRA or of larger ranks run "
                "without, a few times as slow; start with a smaller --gpu-memory or --kv-cache"
            )
