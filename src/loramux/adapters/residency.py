"""Where each adapter lives: the one place that decides slots. Workers carry out its orders."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Set
from dataclasses import dataclass

from loramux.adapters.host_tier import HostTier
from loramux.plan import SlotClear, SlotLoad, SlotOrder
from loramux.types import AdapterId, Slot, Tier


@dataclass(frozen=True, slots=True)
class Room:
    """What makes room for a copy in host memory."""

    orders: tuple[SlotOrder, ...]
    """Free the slots of those that lose theirs."""
    dropped: tuple[AdapterId, ...]
    """Lose their copies, after that."""


class Residency:
    """Slots and bytes, given to adapters in use and taken from the one idle the longest.

    An adapter that is known has, from tier to tier: nothing (its source has it), a copy in host
    memory, a slot as well. A slot needs the copy, and whoever loses the copy loses the slot. Every
    load has a new generation, so weights that were evicted and loaded again can never be
    mistaken for those a stale table still points at. The base model is slot ``num_slots``.
    """

    def __init__(
        self,
        num_slots: int,
        capacity_bytes: int,
        host_bytes: int,
        max_host_copies: int | None = None,
    ) -> None:
        """``capacity_bytes`` are the device's; the host has at least as many, and copies for all
        slots."""
        assert host_bytes >= capacity_bytes, "whatever has a slot has a copy as well"
        assert max_host_copies is None or max_host_copies >= num_slots
        self.num_slots = num_slots
        self.host = HostTier(host_bytes, max_host_copies)
        self.capacity_bytes = capacity_bytes
        self.num_evictions = 0
        self._bytes: dict[AdapterId, int] = {}
        self._slot_of: OrderedDict[AdapterId, Slot] = OrderedDict()  # least recently used first
        self._pinned: set[AdapterId] = set()
        self._free = [Slot(slot) for slot in reversed(range(num_slots))]
        self._used_bytes = 0
        self._generation = 0

    @property
    def base_slot(self) -> Slot:
        return Slot(self.num_slots)

    @property
    def num_loads(self) -> int:
        """Loads into a slot so far; the newest one's generation."""
        return self._generation

    @property
    def num_resident(self) -> int:
        return len(self._slot_of)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def objection(
        self, adapter_id: AdapterId, num_bytes: int, pinned: Collection[AdapterId]
    ) -> str | None:
        """Why an adapter would leave one that can never run, itself or another; with the remedy.

        ``pinned`` are the adapters that will be pinned once it is there.
        """
        pinned_bytes = sum(num_bytes if a == adapter_id else self._bytes[a] for a in pinned)
        if adapter_id not in pinned and pinned_bytes + num_bytes <= self.capacity_bytes:
            return None  # those that are known already have room beside the pinned ones
        sizes = self._bytes | {adapter_id: num_bytes}
        largest = max((size for a, size in sizes.items() if a not in pinned), default=0)
        remedy = f"start with --device-cache {pinned_bytes + largest} or more"
        if adapter_id not in pinned:
            return (
                f"it needs {num_bytes:,} bytes, of the device cache of "
                f"{self.capacity_bytes:,} {pinned_bytes:,} are pinned: {remedy}"
            )
        if pinned_bytes + largest > self.capacity_bytes:
            return (
                f"with it {pinned_bytes:,} bytes of the device cache of {self.capacity_bytes:,} "
                f"would be pinned, and another adapter needs {largest:,}: {remedy}, "
                "or do not pin it"
            )
        if len(pinned) >= self.num_slots:
            return (
                f"pinning it would leave no slot for others: start with --max-loras "
                f"{len(pinned) + 1} or more, or do not pin it"
            )
        return None

    def add(self, adapter_id: AdapterId, num_bytes: int) -> None:
        """Make an adapter known to which there is no objection; it has no copy yet.

        One that is known, and has none either, gets another size.
        """
        known = self._bytes.get(adapter_id, num_bytes)
        assert known == num_bytes or self.lacks_copy(adapter_id), "a copy keeps its size"
        self._bytes[adapter_id] = num_bytes

    def lacks_copy(self, adapter_id: AdapterId) -> bool:
        """Whether an adapter has no copy in host memory, and none is on its way."""
        return adapter_id not in self.host and adapter_id not in self.host.fetching

    def has_host_room(self, adapter_id: AdapterId, in_use: Collection[AdapterId]) -> bool:
        """Whether a copy is there, on its way, or ``make_host_room`` would find room for one."""
        return not self.lacks_copy(adapter_id) or self.host.has_room(
            self._bytes[adapter_id], {*in_use, *self._pinned}
        )

    def make_host_room(self, adapter_id: AdapterId, in_use: Collection[AdapterId]) -> Room | None:
        """Begin to fetch an adapter's copy, or None if it must wait; then nothing changes.

        Adapters ``in_use`` and pinned ones keep their copies.
        """
        kept = {*in_use, *self._pinned}
        victims = self.host.make_room(adapter_id, self._bytes[adapter_id], kept)
        if victims is None:
            return None
        resident = [victim for victim in victims if victim in self._slot_of]
        self.num_evictions += len(resident)
        return Room(tuple(SlotClear(self._vacate(v)) for v in resident), tuple(victims))

    def set_pinned(self, adapter_ids: Collection[AdapterId]) -> None:
        """Pin these and no others: a pinned adapter keeps its slot while idle, once it has one."""
        self._pinned = set(adapter_ids)

    @property
    def pinned(self) -> Set[AdapterId]:
        return self._pinned

    def bytes_of(self, adapter_id: AdapterId) -> int:
        return self._bytes[adapter_id]

    def tier_of(self, adapter_id: AdapterId) -> Tier:
        """The best place that a known adapter is in."""
        if adapter_id in self._slot_of:
            return "slot"
        return "host" if adapter_id in self.host else "source"

    def knows(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self._bytes

    def known(self) -> Set[AdapterId]:
        return self._bytes.keys()

    def slot_of(self, adapter_id: AdapterId | None) -> Slot:
        """The slot of a resident adapter; None is the base model."""
        return self.base_slot if adapter_id is None else self._slot_of[adapter_id]

    def find_slot(self, adapter_id: AdapterId) -> Slot | None:
        return self._slot_of.get(adapter_id)

    def can_place(self, adapter_id: AdapterId, in_use: Collection[AdapterId]) -> bool:
        """Whether ``place`` would make the adapter resident, once its copy is there."""
        if adapter_id in self._slot_of:
            return True
        if not self.has_host_room(adapter_id, in_use):
            return False
        return self._victims(self._bytes[adapter_id], in_use) is not None

    def place(
        self, adapter_id: AdapterId, in_use: Collection[AdapterId]
    ) -> tuple[SlotOrder, ...] | None:
        """Orders that make the adapter resident (none if it is), or None if it must wait.

        Adapters ``in_use`` keep their slots. Nothing changes when the answer is None.
        """
        assert adapter_id in self.host, "an adapter is placed whose copy is not there"
        self.host.touch(adapter_id)
        if adapter_id in self._slot_of:
            self._slot_of.move_to_end(adapter_id)
            return ()
        victims = self._victims(self._bytes[adapter_id], in_use)
        if victims is None:
            return None
        orders: list[SlotOrder] = [SlotClear(self._vacate(victim)) for victim in victims]
        self.num_evictions += len(victims)
        slot = self._free.pop()
        self._slot_of[adapter_id] = slot
        self._used_bytes += self._bytes[adapter_id]
        self._generation += 1
        return (*orders, SlotLoad(slot, adapter_id, self._generation))

    def note_idle(self, adapter_id: AdapterId) -> None:
        """The last sequence of a resident adapter has ended: its idle time begins."""
        self._slot_of.move_to_end(adapter_id)
        self.host.touch(adapter_id)

    def forget(self, adapter_id: AdapterId) -> Room:
        """Drop an adapter that nobody uses, in every tier."""
        slot = self._vacate(adapter_id) if adapter_id in self._slot_of else None
        del self._bytes[adapter_id]
        self._pinned.discard(adapter_id)
        dropped = (adapter_id,) if self.host.forget(adapter_id) else ()
        return Room(() if slot is None else (SlotClear(slot),), dropped)

    def check(self) -> None:
        """Assert that slots and bytes add up."""
        slots = [*self._free, *self._slot_of.values()]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
        assert self._used_bytes == sum(self._bytes[a] for a in self._slot_of)
        assert self._used_bytes <= self.capacity_bytes
        self.host.check()
        assert all(adapter_id in self.host for adapter_id in self._slot_of), "a slot without a copy"
        assert self._pinned <= self._bytes.keys()
        assert not self._pinned or len(self._pinned) < self.num_slots, "no slot left by the pins"
        for adapter_id in self._bytes:
            beside = sum(self._bytes[pinned] for pinned in self._pinned - {adapter_id})
            assert beside + self._bytes[adapter_id] <= self.capacity_bytes, "it can never run"

    def _victims(self, num_bytes: int, in_use: Collection[AdapterId]) -> list[AdapterId] | None:
        """Idle adapters, least recently used first, whose slots and bytes are enough."""
        free_slots, free_bytes = len(self._free), self.capacity_bytes - self._used_bytes
        victims: list[AdapterId] = []
        for candidate in self._slot_of:
            if free_slots and num_bytes <= free_bytes:
                break
            if candidate not in in_use and candidate not in self._pinned:
                victims.append(candidate)
                free_slots += 1
                free_bytes += self._bytes[candidate]
        return victims if free_slots and num_bytes <= free_bytes else None

    def _vacate(self, adapter_id: AdapterId) -> Slot:
        slot = self._slot_of.pop(adapter_id)
        self._used_bytes -= self._bytes[adapter_id]
        self._free.append(slot)
        return slot
