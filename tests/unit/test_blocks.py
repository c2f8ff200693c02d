"""Which KV blocks are free."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.scheduling.blocks import BlockAllocator


def test_blocks_are_distinct_and_in_range() -> None:
    blocks = BlockAllocator(5)
    assert sorted((blocks.allocate(2) or []) + (blocks.allocate(3) or [])) == [0, 1, 2, 3, 4]


def test_too_many_takes_none() -> None:
    blocks = BlockAllocator(3)
    assert blocks.allocate(4) is None
    assert (blocks.num_free, blocks.num_used) == (3, 0)


def test_nothing_can_be_asked_for() -> None:
    assert BlockAllocator(1).allocate(0) == []


def test_the_block_freed_last_is_given_next() -> None:
    blocks = BlockAllocator(8)
    first, second = blocks.allocate(1) or [], blocks.allocate(1) or []
    blocks.free(second)
    blocks.free(first)
    assert blocks.allocate(2) == [*first, *second]


def test_a_freed_sequence_of_blocks_is_given_again_in_its_order() -> None:
    blocks = BlockAllocator(8)
    taken = blocks.allocate(3) or []
    blocks.free(taken)
    assert blocks.allocate(3) == taken


def test_a_block_that_is_not_in_use_cannot_be_freed() -> None:
    blocks = BlockAllocator(2)
    taken = blocks.allocate(1) or []
    blocks.free(taken)
    with pytest.raises(KeyError):
        blocks.free(taken)


class BlockWalk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(7)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = self.blocks.num_free
        taken = self.blocks.allocate(count)
        assert (taken is None) == (count > free)
        if taken is not None:
            assert len(taken) == count
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.blocks.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.blocks.check()
        held = [block for blocks in self.held for block in blocks]
        assert len(held) == len(set(held)) == self.blocks.num_used


TestBlockWalk = BlockWalk.TestCase
