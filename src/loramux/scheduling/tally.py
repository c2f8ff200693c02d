"""Values sorted into buckets while they are observed."""

from __future__ import annotations

from bisect import bisect_left

from loramux.stats import Histogram

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds for what takes from one step up to a download."""
STEP_SECONDS = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
ADAPTERS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Tally:
    """Grows into a ``Histogram``. One thread observes, any may ask."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def histogram(self) -> Histogram:
        """What has been observed so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)
