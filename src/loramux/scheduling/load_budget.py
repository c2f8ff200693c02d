"""How many bytes of adapters one step may bring into slots, and who waits for them."""

from __future__ import annotations


class LoadBudget:
    """What the copies of one step may amount to, and whether the step is to wait for them.

    A step waits for the copies of its own slots, and all its sequences wait with it. So while some
    run, a step brings in one adapter, and others only within ``max_bytes`` in all. The first that
    is too much ends it, so that nobody is overtaken again and again by smaller ones. What takes
    longer comes in ahead of its sequences: larger adapters, and all that stand behind one.
    """

    def __init__(self, max_bytes: int, *, anyone_waits: bool, any_under_way: bool) -> None:
        """``anyone_waits``: whether sequences run that the copies would hold up;
        ``any_under_way``: whether copies of earlier steps are to end first."""
        self._max_bytes = max_bytes
        self.is_bounded = anyone_waits
        self._stands_behind = any_under_way
        self._num_bytes = 0

    def take(self, num_bytes: int) -> bool:
        """Whether an adapter of this size may come in with this step."""
        self._num_bytes += num_bytes
        is_first = self._num_bytes == num_bytes
        return not self.is_bounded or is_first or self._num_bytes <= self._max_bytes

    @property
    def takes_long(self) -> bool:
        """Whether the step would be held up, if it had a sequence of what came in last."""
        too_much = self._num_bytes > self._max_bytes
        return self.is_bounded and (self._stands_behind or too_much)
