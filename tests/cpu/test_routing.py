"""Routing: the buffers of a step against a naive model, at addresses that never change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loramux.lora.routing import Routing
from loramux.types import Slot

SLOTS = 4
TOKENS = 24
BUFFERS = ("token_slot", "sorted_rows", "slot_start", "token_count")


def make() -> Routing:
    return Routing(SLOTS, TOKENS, torch.device("cpu"))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Slot], list[int], int]:
    """Slots (the base's too) and token counts of sequences, and rows that hold them all."""
    counts: list[int] = []
    while sum(counts) < TOKENS and draw(st.booleans()):
        counts.append(draw(st.integers(1, min(6, TOKENS - sum(counts)))))
    slots = [Slot(draw(st.integers(0, SLOTS))) for _ in counts]
    num_rows = draw(st.integers(sum(counts), TOKENS).filter(bool))
    return (sorted(slots) if draw(st.booleans()) else slots), counts, num_rows


@given(st.lists(steps(), min_size=1, max_size=4))
def test_buffers_say_what_a_naive_model_says(walk: list[tuple[list[Slot], list[int], int]]) -> None:
    routing = make()
    addresses = [getattr(routing, name).data_ptr() for name in BUFFERS]
    for slots, counts, num_rows in walk:
        routing.fill(slots, counts, num_rows)

        tokens = [s for s, count in zip(slots, counts, strict=True) for _ in range(count)]
        padded = [*tokens, *[SLOTS] * (num_rows - len(tokens))]
        rows = sorted(range(num_rows), key=lambda row: (padded[row], row))
        below = [sum(s < slot for s in padded) for slot in range(SLOTS + 1)]
        assert routing.token_slot[:num_rows].tolist() == padded
        assert routing.sorted_rows[:num_rows].tolist() == rows
        assert routing.slot_start.tolist() == [*below, num_rows]
        assert routing.num_tokens == len(tokens)
        assert routing.token_count.tolist() == [len(tokens)]
        assert routing.in_order == (tokens == sorted(tokens))
        assert [(s.slot, s.start, s.end) for s in routing.segments] == [
            (slot, below[slot], below[slot + 1])
            for slot in range(SLOTS)
            if below[slot] < below[slot + 1]
        ]
    assert [getattr(routing, name).data_ptr() for name in BUFFERS] == addresses


@given(steps())
def test_rows_of_a_segment_are_the_tokens_of_its_slot(
    step: tuple[list[Slot], list[int], int],
) -> None:
    routing = make()
    routing.fill(*step)
    for segment in routing.segments:
        rows = routing.sorted_rows[segment.start : segment.end].long()
        assert set(routing.token_slot[rows].tolist()) == {segment.slot}


def test_every_token_of_a_sequence_has_its_slot() -> None:
    routing = make()
    routing.fill([Slot(2), Slot(SLOTS), Slot(0)], [3, 1, 2])
    assert routing.token_slot[:6].tolist() == [2, 2, 2, SLOTS, 0, 0]


def test_padding_rows_point_at_the_base() -> None:
    routing = make()
    routing.fill([Slot(1)] * 5, [2] * 5)
    routing.fill([Slot(3)], [1], 8)
    assert routing.token_slot[:8].tolist() == [3, *[SLOTS] * 7]


def test_a_step_of_the_base_alone_has_no_segments() -> None:
    routing = make()
    routing.fill([Slot(SLOTS), Slot(SLOTS)], [4, 1])
    assert routing.segments == ()
    assert routing.in_order


def test_a_step_may_fill_every_row() -> None:
    routing = make()
    routing.fill([Slot(0), Slot(1)], [TOKENS - 1, 1])
    assert routing.slot_start.tolist() == [0, TOKENS - 1, TOKENS, TOKENS, TOKENS, TOKENS]


def test_a_smaller_step_leaves_nothing_of_a_larger_one_in_its_order() -> None:
    routing = make()
    routing.fill([Slot(2)] * 6, [4] * 6)
    routing.fill([Slot(SLOTS), Slot(1)], [1, 2])
    assert routing.sorted_rows[:3].tolist() == [1, 2, 0]
    assert routing.slot_start.tolist() == [0, 0, 2, 2, 2, 3]


def test_more_tokens_than_rows_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="do not fit into a step"):
        make().fill([Slot(0)], [TOKENS + 1])


def test_buffers_are_32_bit_and_slot_start_is_one_longer_than_the_counts() -> None:
    routing = make()
    assert {getattr(routing, name).dtype for name in BUFFERS} == {torch.int32}
    assert routing.slot_start.shape == (SLOTS + 2,)
