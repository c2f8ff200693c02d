"""Loads beside steps: every step finds its weights whole, and waits for no others'."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from loramux.lora.device_store import DeviceStore
from loramux.lora.host_memory import HostBlock
from loramux.lora.lanes import DirectLane
from loramux.lora.transfers import Transfers
from loramux.plan import LOAD_BYTES
from loramux.types import Slot
from tests.cpu.lanes import SlowLane, SlowMark, finish

CPU = torch.device("cpu")
NUM_SLOTS = 5
UNITS = 16


class Machine:
    """An arena on a device that is as slow as one likes."""

    def __init__(self, num_units: int = UNITS, load_bytes: int = LOAD_BYTES) -> None:
        self.steps, self.copies = SlowLane(), SlowLane()
        self.transfers = Transfers(self.steps, self.copies, load_bytes)
        self.store = DeviceStore(num_units * 16, torch.float32, CPU, self.transfers)
        self.store.arena.zero_()
        self.blocks: dict[Slot, Tensor] = {}
        self.num_steps_over = 0

    def load(self, slot: int, block: Tensor) -> list[Slot]:
        self.blocks[Slot(slot)] = block
        return self.store.load(Slot(slot), HostBlock((block,)))

    def clear(self, slot: int) -> None:
        del self.blocks[Slot(slot)]
        self.store.clear(Slot(slot))

    def launch(self, *slots: int) -> SlowMark:
        """A step that looks at its slots' weights when it begins and when it ends."""
        reads = [(self.store.start_of(Slot(slot)), self.blocks[Slot(slot)]) for slot in slots]

        def look() -> None:
            for start, block in reads:
                found = self.store.arena[start : start + len(block)]
                assert torch.equal(found, block), "a step has read weights that are not its own"

        def end() -> None:
            look()
            self.num_steps_over += 1

        with self.transfers.step([Slot(slot) for slot in slots]):
            self.steps.ask(look)
            self.steps.ask(end)
        return self.steps.mark()

    def finish(self) -> None:
        finish(self.steps, self.copies)


class Walk(RuleBasedStateMachine):
    """Loads, clears and steps at random, while the lanes go on as they like."""

    load_bytes = LOAD_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(load_bytes=self.load_bytes)
        self.num_launched = 0
        self.stamp = 0.0
        self.copied: dict[int, int] = {}
        """By slot, where its copy ends in the lane of copies."""
        self.reads: list[tuple[int, int, int]] = []
        """Start and end of what a step reads, and where it ends in the lane of steps."""

    @property
    def free_units(self) -> int:
        return UNITS - self.machine.store.used_bytes // 16

    @precondition(lambda self: len(self.machine.blocks) < NUM_SLOTS and self.free_units > 0)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        machine = self.machine
        free = [slot for slot in range(NUM_SLOTS) if slot not in machine.blocks]
        slot = data.draw(st.sampled_from(free))
        size = data.draw(st.integers(1, min(self.free_units, UNITS // 2))) * 4
        self.stamp += 1000
        moves = machine.store._find_room(size) is None
        waits, steps_waits = len(machine.copies.waits), len(machine.steps.waits)
        reads = [read for read in self.reads if read[2] > machine.steps.num_done]

        machine.load(slot, torch.arange(size) + self.stamp)

        self.copied[slot] = machine.copies.mark().place
        start = machine.store.start_of(Slot(slot))
        waited = {mark.place for mark in machine.copies.waits[waits:]}
        overwritten = {last for a, b, last in reads if a < start + size and start < b}
        if moves:
            self.reads.clear()
        else:
            # A copy that is put off waits later.
            assert waited <= overwritten, "a load waits for a step that reads something else"
            assert len(machine.steps.waits) == steps_waits, "a load makes steps wait"

    @precondition(lambda self: self.machine.blocks)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.machine.clear(data.draw(st.sampled_from(sorted(self.machine.blocks))))

    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        machine = self.machine
        present = sorted(machine.blocks)
        slots = data.draw(st.lists(st.sampled_from(present), unique=True)) if present else []
        before = len(machine.steps.waits)

        end = machine.launch(*slots).place

        waited = {mark.place for mark in machine.steps.waits[before:]}
        if self.load_bytes == LOAD_BYTES:  # nothing was put off
            assert waited <= {self.copied[s] for s in slots}, "a step waits for another slot's load"
        assert len(waited) <= len(slots)
        self.num_launched += 1
        for slot in slots:
            start = machine.store.start_of(slot)
            self.reads.append((start, start + len(machine.blocks[slot]), end))

    @rule(steps=st.integers(0, 4), copies=st.integers(0, 4))
    def go_on(self, steps: int, copies: int) -> None:
        for lane, count in ((self.machine.steps, steps), (self.machine.copies, copies)):
            for _ in range(count):
                lane.go_on()

    @invariant()
    def blocks_are_apart(self) -> None:
        self.machine.store.check()

    def teardown(self) -> None:
        self.machine.finish()
        assert self.machine.num_steps_over == self.num_launched
        if self.machine.blocks:  # what nobody has needed may be still to come
            self.machine.launch(*self.machine.blocks)
            self.machine.finish()
        for slot, block in self.machine.blocks.items():
            start = self.machine.store.start_of(slot)
            assert torch.equal(self.machine.store.arena[start : start + len(block)], block)


class WalkInPortions(Walk):
    """Most blocks are copied behind several steps."""

    load_bytes = 32


TestWalk = Walk.TestCase
TestWalkInPortions = WalkInPortions.TestCase
TestWalkInPortions.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWalk.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.finish()


def test_a_step_runs_while_the_weights_of_another_slot_are_still_on_their_way(
    machine: Machine,
) -> None:
    machine.load(0, torch.ones(8))
    finish(machine.copies)
    machine.load(1, torch.ones(8))
    end = machine.launch(0)
    finish(machine.steps)
    assert end.query()


def test_a_step_begins_when_its_own_weights_are_there(machine: Machine) -> None:
    machine.load(0, torch.ones(8))
    end = machine.launch(0)
    while machine.steps.go_on():
        pass
    assert not end.query()
    machine.finish()
    assert end.query()


def test_a_slot_has_arrived_when_its_copy_has_ended(machine: Machine) -> None:
    machine.load(0, torch.ones(8))
    finish(machine.copies)
    machine.load(1, torch.ones(8))
    assert [machine.transfers.has_arrived(Slot(slot)) for slot in range(2)] == [True, False]
    machine.finish()
    assert machine.transfers.has_arrived(Slot(1))


def test_a_large_block_is_copied_in_portions_behind_steps_that_do_not_need_it() -> None:
    """Of four parts of 16 bytes, then five and so on, as long as each is over in time."""
    machine = Machine(load_bytes=8 * 16)
    machine.load(0, torch.ones(4))
    machine.launch(0)
    machine.load(1, torch.arange(60.0))
    for copied in (0, 16, 36):
        finish(machine.copies)
        found = machine.store.arena[4:].tolist()
        assert found == [*range(copied), *[0.0] * (60 - copied)]
        assert not machine.transfers.has_arrived(Slot(1))
        machine.launch(0)
    machine.finish()
    assert machine.transfers.has_arrived(Slot(1))
    machine.launch(1)
    machine.finish()


def test_a_portion_that_is_not_over_when_the_next_step_comes_was_too_large() -> None:
    machine = Machine(num_units=64, load_bytes=8 * 16)
    machine.load(0, torch.ones(64 * 4))
    asked = []
    for in_time in (True, True, True, True, False, False, False, False):
        before = machine.copies.mark().place
        machine.launch()
        # The lane does each part in two pieces.
        asked.append((machine.copies.mark().place - before) // 2)
        if in_time:
            finish(machine.copies)
    assert asked == [4, 5, 6, 7, 8, 4, 2, 1]
    machine.finish()


def test_a_step_that_needs_a_large_block_has_all_of_it_copied() -> None:
    machine = Machine(load_bytes=64)
    machine.load(0, torch.arange(20.0))
    machine.load(1, torch.arange(24.0))
    machine.launch(1)
    machine.finish()
    assert machine.store.arena[:44].tolist() == [*range(20), *range(24)]


def test_a_large_block_that_is_not_wanted_any_more_is_copied_no_further() -> None:
    machine = Machine(load_bytes=64)
    block = torch.ones(20)
    machine.load(0, block)
    machine.launch()
    machine.clear(0)
    alive = weakref.ref(block)
    del block
    machine.launch()
    gc.collect()
    assert alive() is not None, "its first portion is under way"
    machine.finish()
    machine.launch()
    gc.collect()
    assert alive() is None
    assert machine.store.arena.sum() == 8


def test_only_the_first_step_with_a_slot_waits_for_it(machine: Machine) -> None:
    machine.load(0, torch.ones(8))
    machine.launch(0)
    machine.launch(0)
    assert len(machine.steps.waits) == 1


def test_a_load_waits_for_the_last_step_that_reads_what_it_overwrites(machine: Machine) -> None:
    machine.load(0, torch.ones(UNITS * 4))
    machine.launch(0)
    last = machine.launch(0)
    machine.launch()
    machine.clear(0)
    machine.load(1, torch.zeros(UNITS * 4))
    assert machine.copies.waits == [last]


@pytest.mark.parametrize("cleared", [0, 1, 2])
def test_a_load_takes_room_that_nobody_reads_before_room_that_it_must_wait_for(
    machine: Machine, cleared: int
) -> None:
    """With room for one block more, whichever goes while steps run, the next need not wait."""
    for slot in range(3):
        machine.load(slot, torch.full((16,), float(slot)))
    machine.launch(0, 1, 2)
    machine.clear(cleared)
    machine.load(3, torch.full((16,), 3.0))
    machine.launch(3)
    assert machine.copies.waits == []
    # Now all that is free is being read.
    start = machine.store.start_of(Slot(3))
    assert start == 3 * 16
    machine.load(4, torch.full((16,), 4.0))
    assert len(machine.copies.waits) == 1
    machine.finish()
    # And nothing of it is any more.
    machine.clear(3)
    machine.load(5, torch.full((16,), 5.0))
    assert len(machine.copies.waits) == 1


def test_room_that_nobody_reads_may_begin_inside_a_gap(machine: Machine) -> None:
    machine.load(0, torch.ones(8))
    machine.load(1, torch.ones(8))
    machine.launch(0)
    machine.clear(0)
    machine.clear(1)
    machine.load(2, torch.ones(16))
    assert machine.store.start_of(Slot(2)) == 8
    assert machine.copies.waits == []


@pytest.mark.parametrize("reader", [None, 0])
def test_a_load_into_room_that_nobody_reads_begins_at_once(
    machine: Machine, reader: int | None
) -> None:
    """Room that was never used, and room whose slot no step had."""
    machine.load(0, torch.ones(8))
    machine.load(1, torch.ones(8))
    machine.launch(*([] if reader is None else [reader]))
    machine.clear(1)
    machine.load(2, torch.ones(8))
    machine.load(3, torch.ones(8))
    assert machine.copies.waits == []


def test_a_load_over_a_finished_step_begins_at_once(machine: Machine) -> None:
    machine.load(0, torch.ones(UNITS * 4))
    machine.launch(0)
    machine.clear(0)
    machine.finish()
    machine.load(0, torch.zeros(UNITS * 4))
    assert machine.copies.waits == []


def test_blocks_move_only_after_their_copies_and_running_steps() -> None:
    machine = Machine(num_units=4)
    machine.load(0, torch.full((4,), 1.0))
    machine.load(1, torch.full((4,), 2.0))
    machine.load(2, torch.full((4,), 3.0))
    machine.launch(0, 2)
    machine.clear(0)
    # Slot 1 is still on its way, slot 2 is being read, and there is no gap of two units.
    assert machine.load(3, torch.full((8,), 4.0)) == [Slot(1), Slot(2)]
    machine.launch(1, 2, 3)
    machine.finish()
    assert machine.store.arena.tolist() == [2.0] * 4 + [3.0] * 4 + [4.0] * 8


def test_a_copy_that_is_not_wanted_any_more_writes_over_nothing_that_moves() -> None:
    machine = Machine(num_units=4)
    machine.load(0, torch.full((8,), 1.0))  # cleared before it has arrived
    machine.load(1, torch.full((4,), 2.0))
    machine.clear(0)
    assert machine.load(2, torch.full((12,), 3.0)) == [Slot(1)]
    machine.launch(1, 2)
    machine.finish()
    assert machine.store.arena.tolist() == [2.0] * 4 + [3.0] * 12


def test_host_memory_is_held_until_it_has_been_copied(machine: Machine) -> None:
    block = torch.ones(8)
    alive = weakref.ref(block)
    machine.load(0, block)
    machine.clear(0)
    del block
    gc.collect()
    machine.finish()
    machine.launch()
    gc.collect()
    assert alive() is None


def test_on_a_cpu_a_load_is_done_when_it_returns() -> None:
    transfers = Transfers(DirectLane(), DirectLane())
    arena = torch.zeros(8)
    transfers.load(Slot(0), arena, 2, HostBlock((torch.ones(4),)))
    assert arena.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
