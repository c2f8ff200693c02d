"""Time that goes on when a test says so."""

from __future__ import annotations


class FakeClock:
    def __init__(self) -> None:
        self.now = 5_000.0
        """Seconds."""

    def __call__(self) -> float:
        return self.now
