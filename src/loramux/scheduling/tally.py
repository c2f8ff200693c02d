"""Seconds sorted into buckets while they are observed."""

from __future__ import annotations

from bisect import bisect_left

from loramux.types import Histogram

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds for what takes from one step up to a download."""


class Tally:
    """Grows into a ``Histogram``. One thread observes, any may ask."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def histogram(self) -> Histogram:
        """What has been observed so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)
