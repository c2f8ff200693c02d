"""Parts of a stretch of memory: given out, given back, none twice."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.lora.extents import Extent, Extents

SIZE = 40


def test_one_part_is_given_where_one_is_long_enough() -> None:
    extents = Extents(10)
    first, second = extents.take(3), extents.take(2)
    assert (first, second) == ([Extent(0, 3)], [Extent(3, 2)])
    extents.give_back([Extent(0, 3)])
    assert extents.take(3) == [Extent(0, 3)], "the smallest that fits"
    assert extents.take(5) == [Extent(5, 5)]


def test_several_parts_serve_where_no_single_one_does() -> None:
    extents = Extents(10)
    taken = [extents.take(length) for length in (2, 2, 3, 2, 1)]
    assert None not in taken
    extents.give_back([Extent(0, 2), Extent(4, 3), Extent(9, 1)])
    assert extents.take(5) == [Extent(4, 3), Extent(0, 2)]
    assert extents.take(2) is None
    assert extents.num_free == 1


def test_neighbours_become_one_again() -> None:
    extents = Extents(9)
    for _ in range(3):
        extents.take(3)
    extents.give_back([Extent(0, 3), Extent(6, 3), Extent(3, 3)])
    assert extents.take(9) == [Extent(0, 9)]


def test_nothing_has_no_parts() -> None:
    assert Extents(0).take(1) is None


class Walk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(SIZE)
        self.held: list[list[Extent]] = []

    @rule(length=st.integers(1, SIZE))
    def take(self, length: int) -> None:
        free = self.extents.num_free
        taken = self.extents.take(length)
        assert (taken is None) == (length > free)
        if taken is not None:
            assert sum(extent.length for extent in taken) == length
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.extents.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def holds(self) -> None:
        self.extents.check()
        units = [u for part in self.held for e in part for u in range(e.start, e.end)]
        assert len(units) == len(set(units)) == SIZE - self.extents.num_free
        assert all(0 <= unit < SIZE for unit in units)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("num_rounds", [200])
def test_long_use_leaves_few_pieces(num_rounds: int) -> None:
    """Adapters of three sizes come and go in a full cache; the parts of one stay few."""
    extents = Extents(1000)
    held: list[list[Extent]] = []
    most = 0
    for i in range(num_rounds):
        length = (21, 42, 84)[(i * i) % 3]
        while (taken := extents.take(length)) is None:
            extents.give_back(held.pop(0))
        held.append(taken)
        most = max(most, len(taken))
    assert most <= 8
