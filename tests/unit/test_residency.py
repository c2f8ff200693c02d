"""Which adapter has which slot."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loramux.adapters.residency import Residency, Room
from loramux.plan import SlotClear, SlotLoad, SlotOrder
from loramux.types import AdapterId, Slot
from tests.unit.residents import add_with_copy

A, B, C, D = map(AdapterId, "abcd")


def residency(num_slots: int = 2, capacity: int = 100, **sizes: int) -> Residency:
    """Slots for adapters whose sizes are named, of 10 bytes unless told otherwise."""
    made = Residency(num_slots, capacity, host_bytes=1000)
    for name, num_bytes in (dict.fromkeys("abcd", 10) | sizes).items():
        add_with_copy(made, name, num_bytes)
    return made


def test_the_base_has_the_slot_behind_the_last() -> None:
    assert residency(num_slots=2).slot_of(None) == 2


def test_a_first_placement_is_a_load() -> None:
    assert residency().place(A, in_use=()) == (SlotLoad(Slot(0), A, 1),)


def test_a_resident_adapter_needs_no_order() -> None:
    slots = residency()
    slots.place(A, in_use=())
    assert slots.place(A, in_use=()) == ()


def test_two_adapters_have_two_slots() -> None:
    slots = residency()
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    assert (slots.find_slot(A), slots.find_slot(B)) == (0, 1)


def test_an_adapter_that_was_not_placed_has_no_slot() -> None:
    assert residency().find_slot(A) is None


def test_the_adapter_idle_the_longest_gives_up_its_slot() -> None:
    slots = residency()
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    slots.place(A, in_use=())
    assert slots.place(C, in_use=()) == (SlotClear(Slot(1)), SlotLoad(Slot(1), C, 3))


def test_idle_time_begins_when_the_last_sequence_ends() -> None:
    slots = residency()
    slots.place(A, in_use=())
    slots.place(B, in_use=(A,))
    slots.note_idle(B)
    slots.note_idle(A)
    slots.place(C, in_use=())
    assert (slots.find_slot(A), slots.find_slot(B)) == (0, None)


def test_an_adapter_in_use_keeps_its_slot() -> None:
    slots = residency()
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    slots.place(C, in_use=(A,))
    assert slots.find_slot(A) == 0


def test_an_adapter_waits_while_all_slots_are_in_use() -> None:
    slots = residency(num_slots=1)
    slots.place(A, in_use=())
    assert slots.place(B, in_use=(A,)) is None
    assert slots.find_slot(A) == 0


@pytest.mark.parametrize("in_use", [(), (A,)])
def test_can_place_foretells_place(in_use: tuple[AdapterId, ...]) -> None:
    slots = residency(num_slots=1)
    slots.place(A, in_use=())
    foretold = slots.can_place(B, in_use)
    assert foretold == (slots.place(B, in_use) is not None)


def test_bytes_are_freed_though_slots_are_free() -> None:
    slots = residency(num_slots=3, capacity=100, a=60, b=30, c=50)
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    assert slots.place(C, in_use=()) == (SlotClear(Slot(0)), SlotLoad(Slot(0), C, 3))
    assert slots.used_bytes == 80


def test_several_adapters_go_for_a_large_one() -> None:
    slots = residency(num_slots=3, capacity=100, c=100)
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    slots.place(C, in_use=())
    assert (slots.num_resident, slots.used_bytes, slots.num_evictions) == (1, 100, 2)


def test_nothing_is_evicted_when_it_would_not_be_enough() -> None:
    slots = residency(num_slots=3, capacity=100, c=100)
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    assert slots.place(C, in_use=(B,)) is None
    assert slots.num_resident == 2


def test_a_reload_has_a_new_generation() -> None:
    slots = residency(num_slots=1)
    loads = [slots.place(adapter, in_use=()) for adapter in (A, B, A)]
    assert [orders[-1].generation for orders in loads if orders] == [1, 2, 3]  # type: ignore[union-attr]


def test_an_idle_pinned_adapter_keeps_its_slot() -> None:
    slots = residency()
    slots.set_pinned({A})
    slots.place(A, in_use=())
    slots.place(B, in_use=())
    slots.place(C, in_use=())
    assert (slots.find_slot(A), slots.find_slot(B)) == (0, None)


def test_setting_pins_lets_go_of_the_old_ones() -> None:
    slots = residency()
    slots.set_pinned({A})
    slots.place(A, in_use=())
    slots.set_pinned({B})
    slots.place(C, in_use=())
    slots.place(D, in_use=())
    assert slots.find_slot(A) is None


def test_a_forgotten_adapter_gives_its_slot_and_bytes_back() -> None:
    slots = residency()
    slots.place(A, in_use=())
    assert slots.forget(A) == Room((SlotClear(Slot(0)),), dropped=(A,))
    assert (slots.knows(A), slots.num_resident, slots.used_bytes) == (False, 0, 0)


def test_forgetting_is_no_eviction() -> None:
    slots = residency()
    slots.place(A, in_use=())
    slots.forget(A)
    assert slots.num_evictions == 0


def test_forgetting_an_adapter_without_a_slot_needs_no_order() -> None:
    assert residency().forget(A) == Room((), dropped=(A,))


def test_a_forgotten_adapter_is_not_pinned() -> None:
    slots = residency()
    slots.set_pinned({A})
    slots.forget(A)
    slots.check()


def test_an_adapter_as_large_as_the_cache_is_accepted() -> None:
    assert Residency(2, 100, 100).objection(A, 100, ()) is None


def test_an_adapter_larger_than_the_cache_is_refused_with_the_remedy() -> None:
    objection = Residency(2, 100, 100).objection(A, 101, ())
    assert objection is not None
    assert "--device-cache 101" in objection


def test_bytes_of_pinned_adapters_are_not_to_be_had() -> None:
    slots = residency(a=60)
    objection = slots.objection(AdapterId("new"), 50, {A})
    assert objection is not None
    assert "--device-cache 110" in objection


def test_a_pin_must_leave_bytes_for_the_largest_other_adapter() -> None:
    objection = residency(a=60).objection(B, 50, {B})
    assert objection is not None
    assert "--device-cache 110" in objection
    assert "do not pin it" in objection


def test_a_pin_may_leave_just_enough_bytes() -> None:
    assert residency(a=60).objection(B, 40, {B}) is None


def test_a_pin_must_leave_a_slot() -> None:
    objection = residency(num_slots=2).objection(B, 10, {A, B})
    assert objection is not None
    assert "--max-loras 3" in objection


def test_an_adapter_that_is_pinned_already_is_not_counted_twice() -> None:
    slots = residency(num_slots=2, a=60, b=40)
    slots.set_pinned({A})
    assert slots.objection(A, 60, {A}) is None


# Copies in host memory ---------------------------------------------------------------------------


def small_host(**sizes: int) -> Residency:
    """Adapters without copies, of 10 bytes unless told otherwise; room for 40 bytes of copies."""
    made = Residency(num_slots=2, capacity_bytes=40, host_bytes=40)
    for name, num_bytes in (dict.fromkeys("abcd", 10) | sizes).items():
        made.add(AdapterId(name), num_bytes)
    return made


def fetch(slots: Residency, adapter_id: AdapterId, in_use: tuple[AdapterId, ...] = ()) -> Room:
    room = slots.make_host_room(adapter_id, in_use)
    assert room is not None
    slots.host.arrived(adapter_id)
    return room


def test_an_adapter_needs_a_copy_before_it_has_a_slot() -> None:
    slots = small_host()
    assert slots.lacks_copy(A)
    assert slots.make_host_room(A, in_use=()) == Room((), ())
    assert not slots.lacks_copy(A)
    with pytest.raises(AssertionError, match="copy is not there"):
        slots.place(A, in_use=())
    slots.host.arrived(A)
    assert slots.place(A, in_use=()) is not None


def test_the_copy_unused_the_longest_goes_with_its_slot() -> None:
    slots = small_host(d=30)
    for adapter_id in (A, B, C):
        fetch(slots, adapter_id)
    slots.place(B, in_use=())
    slots.place(A, in_use=())
    assert fetch(slots, D) == Room((SlotClear(Slot(0)),), dropped=(C, B))
    assert slots.find_slot(B) is None
    assert slots.lacks_copy(B)
    slots.check()


def test_copies_in_use_and_pinned_ones_stay() -> None:
    slots = small_host(d=30)
    for adapter_id in (A, B, C):
        fetch(slots, adapter_id)
    slots.set_pinned({B})
    assert slots.make_host_room(D, in_use=(A,)) is None
    assert not slots.can_place(D, in_use=(A,))
    slots.set_pinned(())
    assert fetch(slots, D, in_use=(A,)).dropped == (B, C)


def test_a_copy_that_failed_to_come_leaves_its_room() -> None:
    slots = small_host()
    slots.make_host_room(A, in_use=())
    slots.host.failed(A)
    assert slots.lacks_copy(A)
    assert slots.host.used_bytes == 0


def test_there_may_be_a_limit_to_the_number_of_copies() -> None:
    slots = Residency(num_slots=2, capacity_bytes=100, host_bytes=1000, max_host_copies=3)
    for adapter_id in (A, B, C, D):
        slots.add(adapter_id, 10)
    for adapter_id in (A, B, C):
        fetch(slots, adapter_id)
    assert not slots.has_host_room(D, in_use=(A, B, C))
    assert fetch(slots, D, in_use=(A,)).dropped == (B,)
    slots.check()


def test_an_adapter_may_be_forgotten_while_its_copy_is_on_its_way() -> None:
    slots = small_host()
    slots.make_host_room(A, in_use=())
    assert slots.forget(A) == Room((), ())
    assert slots.host.used_bytes == 0
    slots.check()


def test_a_reload_after_the_copy_was_gone_has_a_new_generation() -> None:
    slots = small_host(b=40)
    fetch(slots, A)
    (first,) = slots.place(A, in_use=()) or ()
    fetch(slots, B)
    fetch(slots, A)
    (again,) = slots.place(A, in_use=()) or ()
    assert (first, again) == (SlotLoad(Slot(0), A, 1), SlotLoad(Slot(0), A, 2))


class ResidencyWalk(RuleBasedStateMachine):
    """Carries out the orders on a table of slots of its own and compares."""

    ids = st.sampled_from([AdapterId(f"x{i}") for i in range(6)])

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(3, 100, host_bytes=150)
        self.copies: set[AdapterId] = set()
        self.fetching: set[AdapterId] = set()
        self.sizes: dict[AdapterId, int] = {}
        self.pinned: set[AdapterId] = set()
        self.table: dict[Slot, AdapterId] = {}

    @rule(adapter_id=ids, num_bytes=st.integers(1, 110), pin=st.booleans())
    def add(self, adapter_id: AdapterId, num_bytes: int, pin: bool) -> None:
        num_bytes = self.sizes.get(adapter_id, num_bytes)
        pinned = self.pinned | {adapter_id} if pin else self.pinned - {adapter_id}
        if self.residency.objection(adapter_id, num_bytes, pinned) is None:
            self.residency.add(adapter_id, num_bytes)
            self.residency.set_pinned(pinned)
            self.sizes[adapter_id] = num_bytes
            self.pinned = pinned

    @rule(adapter_id=ids, in_use=st.sets(ids))
    def begin_fetch(self, adapter_id: AdapterId, in_use: set[AdapterId]) -> None:
        if adapter_id not in self.sizes or adapter_id in self.copies | self.fetching:
            return
        foretold = self.residency.has_host_room(adapter_id, in_use)
        room = self.residency.make_host_room(adapter_id, in_use)
        assert foretold == (room is not None)
        if room is None:
            assert self.fetching or self.copies & (in_use | self.pinned)
            return
        self.give_up(room)
        assert not set(room.dropped) & (in_use | self.pinned)
        self.fetching.add(adapter_id)

    @rule(adapter_id=ids, arrives=st.booleans())
    def end_fetch(self, adapter_id: AdapterId, arrives: bool) -> None:
        if adapter_id not in self.fetching:
            return
        self.fetching.remove(adapter_id)
        if arrives:
            self.residency.host.arrived(adapter_id)
            self.copies.add(adapter_id)
        else:
            self.residency.host.failed(adapter_id)

    @rule(adapter_id=ids, in_use=st.sets(ids))
    def place(self, adapter_id: AdapterId, in_use: set[AdapterId]) -> None:
        if adapter_id not in self.copies:
            return
        before = dict(self.table)
        orders = self.residency.place(adapter_id, in_use)
        if orders is None:
            assert in_use & set(before.values()), "with nothing in use every adapter has a place"
            return
        self.carry_out(orders)
        gone = set(before.values()) - set(self.table.values())
        assert not gone & (in_use | self.pinned)

    @rule(adapter_id=ids)
    def note_idle(self, adapter_id: AdapterId) -> None:
        if adapter_id in self.table.values():
            self.residency.note_idle(adapter_id)

    @rule(adapter_id=ids)
    def forget(self, adapter_id: AdapterId) -> None:
        if adapter_id in self.sizes:
            self.give_up(self.residency.forget(adapter_id))
            self.fetching.discard(adapter_id)
            del self.sizes[adapter_id]
            self.pinned.discard(adapter_id)

    @invariant()
    def the_tables_agree(self) -> None:
        self.residency.check()
        assert {a: self.residency.slot_of(a) for a in self.table.values()} == {
            adapter_id: slot for slot, adapter_id in self.table.items()
        }
        assert self.residency.num_resident == len(self.table)
        assert self.residency.used_bytes == sum(self.sizes[a] for a in self.table.values())
        held = self.copies | self.fetching
        assert self.residency.host.used_bytes == sum(self.sizes[a] for a in held)
        assert {a for a in self.sizes if a in self.residency.host} == self.copies
        assert {a for a in self.sizes if self.residency.lacks_copy(a)} == self.sizes.keys() - held

    def give_up(self, room: Room) -> None:
        self.carry_out(room.orders)
        assert not set(room.dropped) & set(self.table.values()), "a slot without a copy"
        self.copies -= set(room.dropped)

    def carry_out(self, orders: tuple[SlotOrder, ...]) -> None:
        for order in orders:
            if isinstance(order, SlotLoad):
                assert order.slot not in self.table
                self.table[order.slot] = order.adapter_id
            else:
                del self.table[order.slot]


ResidencyWalk.TestCase.settings = settings(max_examples=400, deadline=None)
TestResidencyWalk = ResidencyWalk.TestCase
