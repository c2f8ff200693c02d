"""The arena: every block keeps its content and its place, whatever comes, goes and moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from loramux.lora.device_store import DeviceStore
from loramux.lora.host_memory import HostBlock
from loramux.lora.lanes import lanes_of
from loramux.lora.transfers import Transfers
from loramux.types import Slot

CPU = torch.device("cpu")
NUM_SLOTS = 6
UNITS = 20


def new_store(num_bytes: int, dtype: torch.dtype = torch.float32) -> DeviceStore:
    return DeviceStore(num_bytes, dtype, CPU, Transfers(*lanes_of(CPU)))


class ArenaWalk(RuleBasedStateMachine):
    """Loads and clears at random, in units of 16 bytes, never more than the arena holds."""

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store(UNITS * 16)
        self.address = self.store.arena.data_ptr()
        self.blocks: dict[Slot, Tensor] = {}
        self.starts: dict[Slot, int] = {}
        self.stamp = 0.0

    @property
    def free_units(self) -> int:
        return UNITS - self.store.used_bytes // 16

    @precondition(lambda self: len(self.blocks) < NUM_SLOTS and self.free_units > 0)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.blocks]
        slot = Slot(data.draw(st.sampled_from(free)))
        size = data.draw(st.integers(1, self.free_units)) * 4
        block = torch.arange(size) + self.stamp
        self.stamp += 1000

        moved = self.store.load(slot, HostBlock((block,)))

        really = [s for s in self.blocks if self.store.start_of(s) != self.starts[s]]
        assert sorted(moved) == sorted(really)
        self.blocks[slot] = block

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.blocks)))
        self.store.clear(slot)
        del self.blocks[slot]

    @invariant()
    def holds(self) -> None:
        self.store.check()
        assert self.store.arena.data_ptr() == self.address
        assert self.store.used_bytes == sum(block.nbytes for block in self.blocks.values())
        for slot, block in self.blocks.items():
            start = self.store.start_of(slot)
            assert torch.equal(self.store.arena[start : start + block.numel()], block)
        self.starts = {slot: self.store.start_of(slot) for slot in self.blocks}


TestArenaWalk = ArenaWalk.TestCase
TestArenaWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def filled(*units: int) -> DeviceStore:
    """A store of eight units with a block in each of the first slots."""
    store = new_store(8 * 16)
    for slot, size in enumerate(units):
        store.load(Slot(slot), HostBlock((torch.full((size * 4,), float(slot + 1)),)))
    return store


def test_a_gap_that_is_long_enough_is_used_without_moving_anything() -> None:
    store = filled(2, 3, 3)
    store.clear(Slot(1))
    assert store.load(Slot(3), HostBlock((torch.zeros(8),))) == []
    assert store.start_of(Slot(3)) == 2 * 4


def test_blocks_move_together_only_when_no_gap_is_long_enough() -> None:
    store = filled(2, 2, 2, 2)
    store.clear(Slot(0))
    store.clear(Slot(2))
    assert store.load(Slot(4), HostBlock((torch.full((16,), 5.0),))) == [Slot(1), Slot(3)]
    assert store.arena.tolist() == [2.0] * 8 + [4.0] * 8 + [5.0] * 16


def test_a_block_may_move_onto_a_part_of_itself() -> None:
    store = filled(1, 5, 1)
    block = torch.arange(20.0)
    store.clear(Slot(1))
    store.load(Slot(1), HostBlock((block,)))
    store.clear(Slot(0))
    store.clear(Slot(2))
    store.load(Slot(3), HostBlock((torch.zeros(12),)))
    assert torch.equal(store.arena[:20], block)


def test_a_slot_is_never_filled_twice() -> None:
    store = filled(1)
    with pytest.raises(AssertionError, match="cleared before it is filled"):
        store.load(Slot(0), HostBlock((torch.zeros(4),)))


def test_more_than_the_arena_holds_is_our_own_mistake() -> None:
    store = filled(4)
    with pytest.raises(AssertionError, match="more bytes in than the arena has"):
        store.load(Slot(1), HostBlock((torch.zeros(20),)))


@pytest.mark.parametrize(("num_bytes", "elements"), [(1, 8), (16, 8), (17, 16)])
def test_size_is_rounded_up_to_whole_units(num_bytes: int, elements: int) -> None:
    assert new_store(num_bytes, torch.bfloat16).arena.numel() == elements
