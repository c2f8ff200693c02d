"""Slots that adapters in use give up, for the sake of others that have waited long enough."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass

from loramux.types import AdapterId


@dataclass(slots=True)
class _Wait:
    since: float
    priority: int
    """Of the most urgent of its sequences that wait."""

    @property
    def turn(self) -> tuple[int, float]:
        return self.priority, self.since


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

    A priority is more urgent than another by a lower number. The bound holds against sequences that
    are as urgent as the most urgent one that waits, or less. More urgent ones come first, however
    long it waits: they start on a drained adapter, which ends the drain, and an adapter that they
    run on is not drained. Otherwise they could wait without end for somebody who, behind others as
    urgent as they are, has no place and no blocks to start with.
    """

    def __init__(self, max_wait: float, clock: Callable[[], float]) -> None:
        self._max_wait = max_wait
        self._clock = clock
        self._waits: dict[AdapterId, _Wait] = {}
        self._drains: dict[AdapterId, _Drain] = {}
        self.num_drains = 0

    def is_draining(self, adapter_id: AdapterId, priority: int) -> bool:
        """Whether a sequence of an adapter must not start, though it has a slot."""
        drain = self._drains.get(adapter_id)
        return drain is not None and self._waits[drain.beneficiary].priority <= priority

    def is_late(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter has waited too long."""
        wait = self._waits.get(adapter_id)
        return wait is not None and wait.since <= self._clock() - self._max_wait

    def may_push_aside(self, adapter_id: AdapterId, other: AdapterId) -> bool:
        """Whether an adapter that has waited too long comes before another that waits.

        It does unless the other is more urgent, or as urgent and has waited at least as long: so
        two never take turns in pushing each other aside.
        """
        if not self.is_late(adapter_id):
            return False
        wait = self._waits.get(other)
        return wait is None or self._waits[adapter_id].turn < wait.turn

    def comes_later(
        self, adapter_id: AdapterId, priority: int, ready: Container[AdapterId]
    ) -> bool:
        """Whether a sequence of an adapter without a slot must leave the next one to another.

        Only those that are ``ready`` to take one come before it.
        """
        late = {
            other: wait.turn
            for other, wait in self._waits.items()
            if other in ready and self.is_late(other) and wait.priority <= priority
        }
        return bool(late) and adapter_id != min(late, key=late.__getitem__)

    def overdue(self) -> list[AdapterId]:
        """Adapters that have been drained for long enough, to be preempted now."""
        limit = self._clock() - self._max_wait
        return [adapter_id for adapter_id, drain in self._drains.items() if drain.since <= limit]

    def note_wait(
        self,
        adapter_id: AdapterId,
        priority: int,
        *,
        running: Mapping[AdapterId, int],
        never: Collection[AdapterId],
        can_place: Callable[[AdapterId, Collection[AdapterId]], bool],
    ) -> None:
        """An adapter has sequences to start and no slot; drain others if it has waited too long.

        ``priority``: of the most urgent of these. ``running``: sequences of each adapter in use;
        those in ``never`` are not drained. ``can_place`` tells whether a slot is there for an
        adapter while others are in use.
        """
        now = self._clock()
        since = self._waits.setdefault(adapter_id, _Wait(now, priority)).since
        self.note_priority(adapter_id, priority)
        if now - since < self._max_wait or adapter_id in self._beneficiaries():
            return
        kept = set(running) - self._drains.keys()
        drained: list[AdapterId] = []
        for candidate in sorted(kept - set(never), key=lambda a: (running[a], a)):
            if can_place(adapter_id, kept):
                break
            kept.remove(candidate)
            drained.append(candidate)
        # Where those that stay leave no room by themselves, to drain the others would not help.
        if can_place(adapter_id, kept):
            self._drains |= dict.fromkeys(drained, _Drain(adapter_id, now))
            self.num_drains += len(drained)

    def note_priority(self, adapter_id: AdapterId, priority: int) -> None:
        """Of the most urgent of an adapter's sequences that wait, if it waits for a slot."""
        wait = self._waits.get(adapter_id)
        if wait is None:
            return
        if priority > wait.priority:
            self.pause(adapter_id)  # those drained for it may be more urgent than what is left
        wait.priority = priority

    def note_start(self, adapter_id: AdapterId, priority: int) -> None:
        """A sequence starts; if it is more urgent than who its adapter is drained for, that one
        must look for another slot."""
        drain = self._drains.get(adapter_id)
        if drain is not None and not self.is_draining(adapter_id, priority):
            self.pause(drain.beneficiary)

    def pause(self, adapter_id: AdapterId) -> None:
        """An adapter is not ready for a slot: nobody is drained for it until it waits again."""
        self._drains = {a: d for a, d in self._drains.items() if d.beneficiary != adapter_id}

    def note_no_wait(self, adapter_id: AdapterId) -> None:
        """An adapter has a slot now, or nothing to start any more."""
        self._waits.pop(adapter_id, None)
        self.pause(adapter_id)

    def check(
        self,
        waiting: Mapping[AdapterId, int],
        in_use_before: Callable[[int], Collection[AdapterId]],
    ) -> None:
        """Assert that only those wait, and are drained for, that have sequences to start, and that
        nobody is drained who runs more urgent ones.

        ``waiting``: the priority of the most urgent of each adapter's sequences that wait.
        ``in_use_before`` tells which adapters run sequences more urgent than a priority.
        """
        assert self._waits.keys() <= waiting.keys(), "an adapter waits for nobody"
        assert self._beneficiaries() <= self._waits.keys(), "a drain helps nobody"
        for adapter_id, wait in self._waits.items():
            assert wait.priority >= waiting[adapter_id], "nobody of this priority waits any more"
        for adapter_id, drain in self._drains.items():
            before = in_use_before(self._waits[drain.beneficiary].priority)
            assert adapter_id not in before, "an adapter is drained for a less urgent one"

    def _beneficiaries(self) -> set[AdapterId]:
        return {drain.beneficiary for drain in self._drains.values()}
