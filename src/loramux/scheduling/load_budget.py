"""How many bytes of adapters one step may bring into slots."""

from __future__ import annotations

MAX_STEP_LOAD_BYTES = 64 * 2**20
"""Over PCIe 5 some 1.5 ms, of a decode step's 5 to 10 for a model of 8 billion weights."""


class LoadBudget:
    """What the copies of one step may amount to.

    A step waits for its copies, and all its sequences wait with it. So while some run, a step
    brings in one adapter, and others only within ``max_bytes`` in all. The first that is too much
    ends it, so that nobody is overtaken again and again by smaller ones.
    """

    def __init__(self, max_bytes: int, *, anyone_waits: bool) -> None:
        """``anyone_waits``: whether sequences run that the copies would hold up."""
        self._max_bytes = max_bytes
        self._is_bounded = anyone_waits
        self._num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Whether an adapter of this size may come in with this step."""
        self._num_bytes += num_bytes
        is_first = self._num_bytes == num_bytes
        return not self._is_bounded or is_first or self._num_bytes <= self._max_bytes
