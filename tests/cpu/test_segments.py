"""Segments against a naive model: every row in one of its slot, in a grid that is known before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from loramux.lora.routing import Routing
from loramux.lora.segments import padded_rows
from loramux.ops.tiles import FEW_ADAPTERS, LONG_FROM, MIDDLE_FROM
from loramux.types import Slot

SLOTS = FEW_ADAPTERS + 3
TOKENS = LONG_FROM + 100
CPU = torch.device("cpu")
SIZES = [MIDDLE_FROM - 1, MIDDLE_FROM, 200, LONG_FROM - 1, LONG_FROM, TOKENS]
"""Rows of steps at which the length of segments changes, and between."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Slot], list[int], int, bool]:
    """Slots and token counts of sequences, rows that hold them, and whether adapters are few."""
    few = draw(st.booleans())
    num_rows = draw(st.integers(1, 40) | st.sampled_from(SIZES))
    usable = draw(st.permutations(range(SLOTS)))[: FEW_ADAPTERS if few else SLOTS]
    slots, counts = list[Slot](), list[int]()
    while (left := num_rows - sum(counts)) and draw(st.integers(0, 9)):
        slots.append(Slot(draw(st.sampled_from([*usable, SLOTS]))))
        counts.append(draw(st.integers(1, min(left, max(8, num_rows // 3)))))
    return slots, counts, num_rows, few


FULLEST = ([*(Slot(slot) for slot in range(FEW_ADAPTERS)), Slot(SLOTS)], [1, 1, 1, 1, 17], 21, True)
"""Makes as many segments of few adapters as so many rows can."""


@given(st.lists(steps(), min_size=1, max_size=3))
@example([FULLEST])
def test_every_row_is_in_exactly_one_segment_of_its_slot(
    walk: list[tuple[list[Slot], list[int], int, bool]],
) -> None:
    routing = Routing(SLOTS, TOKENS, CPU)
    for slots, counts, num_rows, few in walk:
        routing.fill(slots, counts, num_rows, few=few)
        segments = routing.device_segments
        held: list[int] = []
        for i in np.flatnonzero(segments.rows[: segments.grid].numpy()):
            slot, start, rows = (int(b[i]) for b in (segments.slot, segments.start, segments.rows))
            assert rows <= segments.block_rows
            members = routing.sorted_rows[start : start + rows]
            assert set(routing.token_slot[members.long()].tolist()) == {slot}
            held += members.tolist()
        assert sorted(held) == list(range(num_rows))


@given(steps())
def test_the_grid_depends_on_rows_and_mix_alone(
    step: tuple[list[Slot], list[int], int, bool],
) -> None:
    slots, counts, num_rows, few = step
    routing = Routing(SLOTS, TOKENS, CPU)
    routing.fill([], [], num_rows, few=few)
    empty = routing.device_segments.grid, routing.device_segments.block_rows
    routing.fill(slots, counts, num_rows, few=few)
    assert (routing.device_segments.grid, routing.device_segments.block_rows) == empty


@pytest.mark.parametrize("num_slots", [1, FEW_ADAPTERS, SLOTS])
@pytest.mark.parametrize("max_tokens", [2, MIDDLE_FROM - 1, MIDDLE_FROM, LONG_FROM - 1, TOKENS])
def test_no_step_is_larger_than_what_is_laid_out(num_slots: int, max_tokens: int) -> None:
    room = padded_rows(num_slots, max_tokens)
    routing = Routing(num_slots, max_tokens, CPU)
    reached = dict.fromkeys(room, 0)
    for num_rows in range(1, max_tokens + 1):
        for few in (False, True):
            routing.fill([], [], num_rows, few=few)
            segments = routing.device_segments
            assert segments.grid <= len(segments.rows)
            padded = segments.grid * segments.block_rows
            assert padded <= room[segments.block_rows]
            reached[segments.block_rows] = max(padded, reached[segments.block_rows])
    assert reached == room


def test_few_adapters_have_a_smaller_grid_and_longer_segments() -> None:
    routing = Routing(64, TOKENS, CPU)
    found = {}
    for num_rows in (64, MIDDLE_FROM, LONG_FROM):
        for few in (True, False):
            routing.fill([], [], num_rows, few=few)
            segments = routing.device_segments
            found[num_rows, few] = (segments.block_rows, segments.grid)
    assert found == {
        (64, True): (16, 5 + 4),
        (64, False): (16, 64),
        (MIDDLE_FROM, True): (32, 5 + 4),
        (MIDDLE_FROM, False): (16, 65 + 8),
        (LONG_FROM, True): (64, 5 + 16),
        (LONG_FROM, False): (64, 65 + 16),
    }


def test_the_base_is_no_adapter_and_repeated_ones_are_one() -> None:
    routing = Routing(SLOTS, TOKENS, CPU)
    slots = [Slot(slot) for slot in (0, 1, 2, 3, SLOTS, 0, 1)]
    routing.fill(slots, [1] * len(slots), few=True)
    assert len(routing.segments) == FEW_ADAPTERS


def test_more_adapters_than_few_are_our_own_mistake() -> None:
    slots = [Slot(slot) for slot in range(FEW_ADAPTERS + 1)]
    with pytest.raises(AssertionError, match="not few"):
        Routing(SLOTS, TOKENS, CPU).fill(slots, [1] * len(slots), few=True)
