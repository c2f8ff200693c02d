"""What the stacked op decides beside the formula, which ``test_reference_op`` checks."""

from __future__ import annotations

import random

import pytest
import torch

from loramux.ops import stacked
from loramux.ops.interface import Segment
from loramux.ops.reference import ReferenceOps
from loramux.ops.stacked import MAX_ROWS, StackedOps, group
from loramux.types import Slot
from tests.cpu.adapted_linear import AdaptedLinear, assert_close

SLOTS = 6
BASE = Slot(SLOTS)


def segments(*lengths: int) -> list[Segment]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [
        Segment(slot, end - n, end) for slot, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ((), []),
        ((1,), [[0]]),
        ((1, 1, 1), [[0, 1, 2]]),
        ((MAX_ROWS, 1), [[0], [1]]),
        ((MAX_ROWS - 1, 1), [[0, 1]]),
        ((2, 300, 1, 1), [[0], [1], [2, 3]]),
        ((1, 1, 300, 1, 1), [[0, 1], [2], [3, 4]]),
        ((40, 40, 20, 40), [[0], [1, 2], [3]]),
    ],
)
def test_neighbours_of_few_rows_share_products(
    lengths: tuple[int, ...], wanted: list[list[int]]
) -> None:
    assert [[segment.slot for segment in run] for run in group(segments(*lengths))] == wanted


def test_a_long_prompt_between_short_segments() -> None:
    linear = AdaptedLinear(53, (40, 17), SLOTS, max_tokens=100)
    for slot in range(SLOTS):
        linear.load(Slot(slot), (3 + slot, 0 if slot == 4 else 2))
    slots = [Slot(0), Slot(1), *[Slot(2)] * 80, Slot(3), Slot(4), Slot(4), Slot(5), BASE, BASE]
    x, y = linear.rows(len(slots))

    got = linear.run(StackedOps(), slots, x, y)

    assert (got - linear.expected(slots, x, y)).abs().max() < 1e-5
    assert torch.equal(got[-2:], y[-2:])


def test_idle_slots_leave_the_stack() -> None:
    linear = AdaptedLinear(53, (40,), SLOTS)
    for slot in range(SLOTS):
        linear.load(Slot(slot), (4,))
    ops = StackedOps()

    def columns(*slots: int) -> int:
        x, y = linear.rows(len(slots))
        linear.run(ops, [Slot(slot) for slot in slots], x, y)
        weights = ops._stacks[0].weights
        assert weights is not None
        return weights.a_t.shape[1]

    assert columns(0, 1, 2, 3, 4, 5) == 32, "eight places"
    assert columns(0, 1, 3, 5) == 32, "half of the slots still find what they need"
    assert columns(0, 3) == 8


def test_a_changed_slot_is_all_that_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = AdaptedLinear(53, (40, 17), SLOTS)
    for slot in range(SLOTS):
        linear.load(Slot(slot), (4, 3))
    ops, slots = StackedOps(), [Slot(0), Slot(1), Slot(1), Slot(2), BASE]
    x, y = linear.rows(len(slots))
    linear.run(ops, slots, x, y)
    copied: list[int] = []
    views_of = stacked.module_views
    monkeypatch.setattr(
        stacked,
        "module_views",
        lambda part, slot, *a: copied.append(slot) or views_of(part, slot, *a),
    )

    linear.clear(Slot(1))
    linear.load(Slot(1), (4, 3))
    assert_close(linear.run(ops, slots, x, y), linear.expected(slots, x, y))
    linear.run(ops, slots, x, y)

    assert copied == [1, 1], "once for each slice"


def test_any_slots_in_turn_take_the_places_of_others() -> None:
    """Few or many slots, of equal or other ranks, loaded anew in between or not."""
    draw = random.Random(5)
    linear = AdaptedLinear(53, (40, 17), SLOTS)
    kinds = [(4, 3), (4, 3), (4, 3), (4, 0), (2, 5), (0, 3)]

    def load(slot: Slot) -> None:
        linear.load(slot, draw.choice(kinds), dora=draw.random() < 0.3)

    for slot in range(SLOTS):
        load(Slot(slot))
    ops = StackedOps()
    for _ in range(200):
        for slot in draw.sample(range(SLOTS), draw.choice([0, 0, 1, 2])):
            linear.clear(Slot(slot))
            load(Slot(slot))
        slots = [Slot(draw.randrange(SLOTS + 1)) for _ in range(draw.randint(1, 9))]
        x, y = linear.rows(len(slots))
        assert_close(linear.run(ops, slots, x, y), linear.expected(slots, x, y))


def test_weights_that_are_not_finite_reach_nobody_else_by_a_place() -> None:
    linear = AdaptedLinear(53, (40,), SLOTS)
    for slot in range(3):
        linear.load(Slot(slot), (4,))
    ops, slots = StackedOps(), [Slot(0), Slot(1), Slot(2)]
    x, y = linear.rows(3)
    linear.run(ops, slots, x, y)
    for poison in ("b", "a"):
        linear.clear(Slot(1))
        linear.load(Slot(1), (4,), poison=poison)
        got = linear.run(ops, slots, x, y)
        assert got[1].isnan().any()
        assert_close(got[::2], linear.expected(slots, x, y)[::2])


@pytest.mark.parametrize("sorted_rows", [True, False])
def test_results_are_those_of_the_reference_within_rounding(sorted_rows: bool) -> None:
    linear = AdaptedLinear(53, (40, 17), SLOTS, torch.bfloat16)
    for slot in range(SLOTS):
        linear.load(Slot(slot), (3 + slot, 8))
    slots = [Slot(i // 2 if sorted_rows else (5 * i) % 7) for i in range(14)]
    x, y = linear.rows(14)
    got = linear.run(StackedOps(), slots, x, y)
    torch.testing.assert_close(got, linear.run(ReferenceOps(), slots, x, y), rtol=2**-7, atol=2**-7)
