"""Which KV blocks are free, held and known."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.scheduling.blocks import BlockAllocator
from loramux.scheduling.prefixes import BlockKey


def key(name: str) -> BlockKey:
    return BlockKey(name.encode())


def known(blocks: BlockAllocator, names: str) -> list[int]:
    """Held blocks, each known by a letter."""
    taken = blocks.allocate(len(names)) or []
    blocks.know(taken, [key(name) for name in names])
    return taken


def findable(blocks: BlockAllocator, names: str) -> str:
    return "".join(name for name in names if blocks.find([key(name)]))


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


def test_a_known_block_is_found_while_it_is_held_and_after() -> None:
    blocks = BlockAllocator(4)
    taken = known(blocks, "ab")
    assert blocks.find([key("a"), key("b")]) == taken
    blocks.free(taken)
    assert blocks.find([key("a"), key("b")]) == taken
    assert (blocks.num_free, blocks.num_used) == (4, 0)


def test_nothing_is_found_behind_a_key_that_nobody_knows() -> None:
    blocks = BlockAllocator(4)
    taken = known(blocks, "ac")
    assert blocks.find([key("a"), key("b"), key("c")]) == taken[:1]


def test_blank_blocks_are_given_before_known_ones() -> None:
    blocks = BlockAllocator(3)
    blocks.free(known(blocks, "a"))
    blocks.allocate(2)
    assert findable(blocks, "a") == "a"
    blocks.allocate(1)
    assert findable(blocks, "a") == ""


def test_the_chain_freed_first_is_lost_first_and_its_tail_before_its_head() -> None:
    blocks = BlockAllocator(4)
    first, second = known(blocks, "ab"), known(blocks, "cd")
    blocks.free(second)
    blocks.free(first)
    left = []
    for _ in range(4):
        blocks.allocate(1)
        left.append(findable(blocks, "abcd"))
    assert left == ["abc", "ab", "a", ""]


def test_a_block_that_was_found_again_is_lost_later() -> None:
    blocks = BlockAllocator(2)
    blocks.free(known(blocks, "a"))
    blocks.free(known(blocks, "b"))
    found = blocks.find([key("a")])
    blocks.hold(found)
    blocks.free(found)
    blocks.allocate(1)
    assert findable(blocks, "ab") == "a"


def test_a_block_is_free_once_the_last_holder_has_let_go() -> None:
    blocks = BlockAllocator(1)
    taken = known(blocks, "a")
    blocks.hold(taken)
    blocks.free(taken)
    assert blocks.num_free == 0
    blocks.free(taken)
    assert blocks.num_free == 1


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    blocks = BlockAllocator(2)
    first, second = known(blocks, "a"), known(blocks, "a")
    assert blocks.find([key("a")]) == first
    blocks.free(second)
    assert blocks.allocate(1) == second


def test_a_forgotten_block_is_not_found_and_stays_with_its_holder() -> None:
    blocks = BlockAllocator(2)
    taken = known(blocks, "ab")
    blocks.free(taken[1:])
    blocks.forget([key("a"), key("b"), key("c")])
    assert findable(blocks, "ab") == ""
    assert blocks.allocate(1) == taken[1:]
    assert blocks.allocate(1) is None
    blocks.check()


class BlockWalk(RuleBasedStateMachine):
    """Chains of blocks named by the letters on the way to them, beside a model that knows no order
    but that of being freed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(7)
        self.held: list[tuple[str, list[int]]] = []
        """What each holder's blocks contain, as far as it is known, and the blocks."""
        self.content: dict[str, int] = {}
        self.freed: list[int] = []
        """Free blocks that can be found, in the order in which they will be lost."""

    def names(self, chain: str) -> list[str]:
        return [chain[: end + 1] for end in range(len(chain))]

    @rule(chain=st.text("ab", max_size=5), extra=st.integers(0, 3))
    def start(self, chain: str, extra: int) -> None:
        """Somebody takes what is known of a chain, and blocks for the rest and for more."""
        names = self.names(chain)
        found = self.blocks.find(key(name) for name in names)
        expected = []
        for name in names:
            if name not in self.content:
                break
            expected.append(self.content[name])
        assert found == expected
        kept = [block for block in found if block in self.freed]
        assert self.blocks.num_free_of(found) == len(kept)
        count = len(chain) - len(found) + extra
        free = self.blocks.num_free - len(kept)
        self.blocks.hold(found)
        self.freed = [block for block in self.freed if block not in kept]
        taken = self.blocks.allocate(count)
        assert (taken is None) == (count > free)
        if taken is None:
            self.let_go(found)
            return
        self.lose(taken)
        blocks = [*found, *taken]
        for name, block in zip(names, blocks, strict=False):
            self.blocks.know([block], [key(name)])
            self.content.setdefault(name, block)
        self.held.append((chain, blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.let_go(blocks)

    @rule(chain=st.text("ab", max_size=3))
    def forget(self, chain: str) -> None:
        self.blocks.forget([key(name) for name in self.names(chain)])
        for name in self.names(chain):
            block = self.content.pop(name, None)
            if block in self.freed:
                self.freed.remove(block)

    def let_go(self, blocks: list[int]) -> None:
        self.blocks.free(blocks)
        held = {block for _, others in self.held for block in others}
        known = set(self.content.values())
        self.freed += [b for b in reversed(blocks) if b not in held and b in known]

    def lose(self, taken: list[int]) -> None:
        """Known blocks are given last, and in their order."""
        lost = [block for block in taken if block in self.freed]
        assert lost == self.freed[: len(lost)]
        assert not lost or taken[-len(lost) :] == lost
        self.freed = self.freed[len(lost) :]
        self.content = {name: b for name, b in self.content.items() if b not in lost}

    @invariant()
    def all_agree(self) -> None:
        self.blocks.check()
        assert self.blocks.holders == Counter(b for _, blocks in self.held for b in blocks)
        for name, block in self.content.items():
            assert self.blocks.find([key(name)]) == [block]
        assert self.blocks.num_free == self.blocks.num_blocks - len(self.blocks.holders)


TestBlockWalk = BlockWalk.TestCase
