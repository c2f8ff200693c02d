"""Slots that adapters in use give up, for the sake of others that have waited long enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from loramux.types import AdapterId


@dataclass(frozen=True, slots=True)
class _Drain:
    beneficiary: AdapterId
    since: float


class Drains:
    """Bounds how long an adapter waits for a slot while others use all of them.

    Once it has waited for ``max_wait`` seconds, the adapters with the fewest running sequences are
    drained, as many as it needs: none of their waiting sequences starts. If they still run when as
    much time has passed again, they are to be preempted. Both ends when the beneficiary has its
    slot, or needs none any more.

    Of those that have waited too long, the one that has waited for the longest comes first:
    adapters that were preempted arrived earlier, and others have never run.
    """

    def __init__(self, max_wait: float, clock: Callable[[], float]) -> None:
        self._max_wait = max_wait
        self._clock = clock
        self._waits_since: dict[AdapterId, float] = {}
        self._drains: dict[AdapterId, _Drain] = {}
        self.num_drains = 0

    def is_draining(self, adapter_id: AdapterId | None) -> bool:
        """Whether sequences of an adapter must not start, though it has a slot."""
        return adapter_id in self._drains

    def comes_later(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter without a slot must leave the next one to another."""
        limit = self._clock() - self._max_wait
        late = {a: since for a, since in self._waits_since.items() if since <= limit}
        return bool(late) and adapter_id != min(late, key=late.__getitem__)

    def overdue(self) -> list[AdapterId]:
        """Adapters that have been drained for long enough, to be preempted now."""
        limit = self._clock() - self._max_wait
        return [adapter_id for adapter_id, drain in self._drains.items() if drain.since <= limit]

    def note_wait(
        self,
        adapter_id: AdapterId,
        running: Mapping[AdapterId, int],
        pinned: Collection[AdapterId],
        can_place: Callable[[AdapterId, Collection[AdapterId]], bool],
    ) -> None:
        """An adapter has sequences to start and no slot; drain others if it has waited too long.

        ``running``: sequences of each adapter in use. ``can_place`` tells whether a slot is there
        for an adapter while others are in use.
        """
        now = self._clock()
        since = self._waits_since.setdefault(adapter_id, now)
        if now - since < self._max_wait or adapter_id in self._beneficiaries():
            return
        kept = set(running) - self._drains.keys()
        drained: list[AdapterId] = []
        for candidate in sorted(kept - set(pinned), key=lambda a: (running[a], a)):
            if can_place(adapter_id, kept):
                break
            kept.remove(candidate)
            drained.append(candidate)
        # Where the pinned ones leave no room by themselves, to drain the others would not help.
        if can_place(adapter_id, kept):
            self._drains |= dict.fromkeys(drained, _Drain(adapter_id, now))
            self.num_drains += len(drained)

    def note_no_wait(self, adapter_id: AdapterId) -> None:
        """An adapter has a slot now, or nothing to start any more."""
        self._waits_since.pop(adapter_id, None)
        self._drains = {a: d for a, d in self._drains.items() if d.beneficiary != adapter_id}

    def check(self, waiting: Collection[AdapterId]) -> None:
        """Assert that only those wait, and are drained for, that have sequences to start."""
        assert self._waits_since.keys() <= set(waiting), "an adapter waits for nobody"
        assert self._beneficiaries() <= self._waits_since.keys(), "a drain helps nobody"

    def _beneficiaries(self) -> set[AdapterId]:
        return {drain.beneficiary for drain in self._drains.values()}
