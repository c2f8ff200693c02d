"""Which adapters have running sequences, and which of the others may have a slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from loramux.adapters.residency import Residency
from loramux.plan import SlotOrder
from loramux.scheduling.drains import Drains
from loramux.scheduling.load_budget import LoadBudget
from loramux.types import AdapterId, Slot


class SlotUse:
    """Counts the running sequences of each adapter, which keeps its slot while it has any.

    A large adapter is brought into its slot ahead of its sequences, and keeps it until it has
    arrived. The base, None wherever an adapter may be named, needs no slot of these.
    """

    def __init__(
        self, residency: Residency, drains: Drains, has_arrived: Callable[[Slot], bool]
    ) -> None:
        """``has_arrived``: whether what was last ordered into a slot is there."""
        self._residency = residency
        self._drains = drains
        self._has_arrived = has_arrived
        self._running: Counter[AdapterId] = Counter()
        self._arriving: set[AdapterId] = set()

    @property
    def num_drains(self) -> int:
        """Adapters in use that were made to give up their slots."""
        return self._drains.num_drains

    def running(self) -> set[AdapterId]:
        """Adapters with running sequences; for any thread."""
        return set(list(self._running))

    def overdue(self) -> list[AdapterId]:
        """Adapters whose sequences are to be preempted, so that others have their slots."""
        return self._drains.overdue()

    def slot_of(self, adapter_id: AdapterId | None) -> Slot:
        return self._residency.slot_of(adapter_id)

    def has_copy(self, adapter_id: AdapterId | None) -> bool:
        """Whether an adapter could be brought into a slot at once."""
        return adapter_id is None or adapter_id in self._residency.host

    def lacks_copy(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter has no copy, and none is on its way."""
        return self._residency.lacks_copy(adapter_id)

    def keep_copies_from(
        self, adapter_id: AdapterId, waiting: Collection[AdapterId]
    ) -> set[AdapterId]:
        """Whose copies must stay for what an adapter needs: of those that run, and of those that
        wait, unless it has waited too long itself and for longer."""
        pushed = {a for a in waiting if self._drains.may_push_aside(adapter_id, a)}
        return (set(waiting) - pushed) | self._in_use()

    def can_have(self, adapter_id: AdapterId | None, priority: int) -> bool:
        """Whether a sequence of an adapter may start now, as far as its slot is concerned."""
        if adapter_id is None:
            return True
        if not self.has_copy(adapter_id):
            return False
        if self._residency.find_slot(adapter_id) is None:
            if self._drains.comes_later(adapter_id, priority, ready=self._residency.host):
                return False
        elif self._drains.is_draining(adapter_id, priority):
            return False
        return self._residency.can_place(adapter_id, self._in_use())

    @property
    def any_arriving(self) -> bool:
        return bool(self._arriving)

    def note_arrivals(self) -> None:
        """Adapters that have arrived may start, and lose their slots to others again."""
        self._arriving = {
            adapter_id
            for adapter_id in self._arriving
            if (slot := self._residency.find_slot(adapter_id)) is not None
            and not self._has_arrived(slot)
        }

    def bring_ahead(
        self, adapter_id: AdapterId | None, loads: LoadBudget
    ) -> tuple[SlotOrder, ...] | None:
        """Orders, mostly none, that bring an adapter that can have a slot there ahead of its
        sequences, which start later; None where they may start with this step."""
        if adapter_id is None:
            return None
        if self._residency.find_slot(adapter_id) is not None:
            return () if adapter_id in self._arriving and loads.is_bounded else None
        if not loads.take(self._residency.bytes_of(adapter_id)):
            return ()
        if not loads.takes_long:
            return None
        orders = self._place(adapter_id)
        self._arriving.add(adapter_id)
        return orders

    def take(self, adapter_id: AdapterId | None, priority: int) -> tuple[SlotOrder, ...]:
        """A sequence of an adapter that can have a slot starts; what brings the adapter there."""
        if adapter_id is None:
            return ()
        orders = self._place(adapter_id)
        self._arriving.discard(adapter_id)
        self._drains.note_start(adapter_id, priority)
        self._running[adapter_id] += 1
        return orders

    def leave(self, adapter_id: AdapterId | None) -> None:
        """A running sequence of an adapter stops."""
        if adapter_id is None:
            return
        self._running[adapter_id] -= 1
        if not self._running[adapter_id]:
            del self._running[adapter_id]
            self._residency.note_idle(adapter_id)

    def wait(
        self,
        adapter_id: AdapterId | None,
        priority: int,
        *,
        waiting: Callable[[], Collection[AdapterId]],
        in_use_before: Callable[[int], Collection[AdapterId]],
    ) -> None:
        """The first waiting sequence of an adapter cannot start for want of a slot.

        ``waiting``: all adapters with sequences that wait, for whatever reason. ``in_use_before``:
        those that run sequences more urgent than a priority.
        """
        if adapter_id is None or self._is_only_fetched(adapter_id, waiting):
            return
        if not self._drains.is_draining(adapter_id, priority):
            self._drains.note_wait(
                adapter_id,
                priority,
                running=self._running + Counter(self._arriving),
                never={*self._residency.pinned, *in_use_before(priority), *self._arriving},
                can_place=self._residency.can_place,
            )

    def note_priority(self, adapter_id: AdapterId, priority: int) -> None:
        """Of the most urgent of an adapter's sequences that wait."""
        self._drains.note_priority(adapter_id, priority)

    def pause(self, adapter_id: AdapterId) -> None:
        """An adapter's copy is on its way now, and its slot is not needed before it is there."""
        self._drains.pause(adapter_id)

    def end_wait(self, adapter_id: AdapterId) -> None:
        """No sequence of an adapter waits any more."""
        self._drains.note_no_wait(adapter_id)

    def check(
        self,
        running: Counter[AdapterId],
        waiting: Mapping[AdapterId, int],
        in_use_before: Callable[[int], Collection[AdapterId]],
    ) -> None:
        """Assert that adapters with ``running`` sequences, so many of each, have their slots."""
        self._residency.check()
        assert running == self._running
        assert len(running) <= self._residency.num_slots
        assert not self._arriving & running.keys(), "who runs has arrived"
        for adapter_id in running:
            self._residency.slot_of(adapter_id)
        self._drains.check(waiting, in_use_before)

    def _in_use(self) -> set[AdapterId]:
        """Adapters that keep their slots."""
        return self._running.keys() | self._arriving

    def _place(self, adapter_id: AdapterId) -> tuple[SlotOrder, ...]:
        orders = self._residency.place(adapter_id, in_use=self._in_use())
        assert orders is not None, "the slot was there a moment ago"
        self._drains.note_no_wait(adapter_id)
        return orders

    def _is_only_fetched(
        self, adapter_id: AdapterId, waiting: Callable[[], Collection[AdapterId]]
    ) -> bool:
        """Whether an adapter waits for its source alone, and takes nothing from others."""
        if self.has_copy(adapter_id):
            return False
        in_use = self.keep_copies_from(adapter_id, waiting())
        return self._residency.has_host_room(adapter_id, in_use)
