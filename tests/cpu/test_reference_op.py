"""The LoRA op against the formula, row by row in float64, and against PEFT's own layer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from loramux.ops.interface import LoraOps
from loramux.ops.reference import ReferenceOps
from loramux.ops.stacked import StackedOps
from loramux.types import Slot
from tests.cpu.adapted_linear import AdaptedLinear, assert_close, bits, load_slots
from tests.cpu.popularity import ORDERS, POPULARITIES, Order, draw_slots

OPS = [ReferenceOps, StackedOps]
SLOTS = 5
BASE = Slot(SLOTS)
ROWS = 11

RANKS = {
    "rank 1": (1, 1, 1),
    "rank 3": (3, 3, 3),
    "rank 8": (8, 8, 8),
    "rank 24": (24, 24, 24),
    "rank 100": (100, 100, 100),
    "mixed ranks": (8, 1, 33),
}


@cache
def loaded(
    ranks: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    dora: bool = False,
    bias: bool = False,
    out_features: tuple[int, ...] = (341,),
) -> AdaptedLinear:
    """A linear of odd sizes; every second adapter leaves one module out when there are several."""
    vector = torch.linspace(-2, 2, sum(out_features)).to(dtype) if bias else None
    linear = AdaptedLinear(53, out_features, SLOTS, dtype, vector)
    return load_slots(linear, ranks, dora=dora)


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(bits(got), bits(wanted))


def differs(got: Tensor, y: Tensor) -> list[int]:
    """Rows that are no longer what they were."""
    return [row for row in range(len(y)) if not torch.equal(got[row], y[row])]


@pytest.mark.parametrize("make_ops", OPS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("out_features", [(341,), (40, 17, 341)], ids=["one slice", "three slices"])
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_follow_the_formula(
    make_ops: type[LoraOps],
    dtype: torch.dtype,
    ranks: tuple[int, ...],
    out_features: tuple[int, ...],
    popularity: str,
    order: Order,
) -> None:
    linear = loaded(ranks, dtype=dtype, out_features=out_features)
    slots = draw_slots(popularity, num_rows=ROWS, num_slots=SLOTS, order=order)
    x, y = linear.rows(ROWS)

    got = linear.run(make_ops(), slots, x, y)

    assert_close(got, linear.expected(slots, x, y))
    base = [row for row, slot in enumerate(slots) if slot == BASE]
    assert_same_bits(got[base], y[base])


@pytest.mark.parametrize("make_ops", OPS)
@pytest.mark.parametrize("popularity", ["distinct", "mixed"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("out_features", [(341,), (40, 17, 341)], ids=["one slice", "three slices"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gain_scales_all_but_the_bias(
    make_ops: type[LoraOps],
    dtype: torch.dtype,
    out_features: tuple[int, ...],
    bias: bool,
    order: Order,
    popularity: str,
) -> None:
    linear = loaded((8, 3, 24), dtype=dtype, dora=True, bias=bias, out_features=out_features)
    slots = draw_slots(popularity, num_rows=ROWS, num_slots=SLOTS, order=order)
    x, y = linear.rows(ROWS)

    got = linear.run(make_ops(), slots, x, y)

    assert_close(got, linear.expected(slots, x, y))
    base = [row for row, slot in enumerate(slots) if slot == BASE]
    assert_same_bits(got[base], y[base])


@pytest.mark.parametrize("make_ops", OPS)
def test_adapters_with_and_without_gain_share_a_step(make_ops: type[LoraOps]) -> None:
    linear = AdaptedLinear(53, (40, 17), SLOTS, bias=torch.linspace(-2, 2, 57))
    for slot in range(SLOTS):
        linear.load(Slot(slot), (4, 4 + slot), dora=slot % 2 == 0)
    slots = draw_slots("distinct", num_rows=ROWS, num_slots=SLOTS, order="sorted")
    x, y = linear.rows(ROWS)

    assert_close(linear.run(make_ops(), slots, x, y), linear.expected(slots, x, y))


@pytest.mark.parametrize("make_ops", OPS)
def test_columns_of_a_slice_that_an_adapter_lacks_keep_every_bit(make_ops: type[LoraOps]) -> None:
    linear = AdaptedLinear(53, (40, 17, 9), SLOTS)
    linear.load(Slot(0), (4, 0, 4))
    linear.load(Slot(1), (0, 0, 3))
    x, y = linear.rows(4)
    y[:, 45] = -0.0

    got = linear.run(make_ops(), [Slot(0), Slot(0), Slot(1), BASE], x, y)

    assert_same_bits(got[:, 40:57].contiguous(), y[:, 40:57].contiguous())
    assert differs(got, y) == [0, 1, 2]


@pytest.mark.parametrize("make_ops", OPS)
def test_rows_beyond_the_step_stay_as_they_are(make_ops: type[LoraOps]) -> None:
    linear = loaded((8,))
    x, y = linear.rows(ROWS)

    got = linear.run(make_ops(), [Slot(1), Slot(3), BASE], x, y)

    assert differs(got, y) == [0, 1]
    assert_same_bits(got[2:], y[2:])


@pytest.mark.parametrize("make_ops", OPS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("poison", ["a", "b"])
def test_nan_in_an_adapter_stays_in_its_rows(
    make_ops: type[LoraOps], poison: str, order: Order
) -> None:
    linear = AdaptedLinear(53, (41,), SLOTS)
    for slot in range(SLOTS):
        linear.load(Slot(slot), (5,), poison=poison if slot == 2 else "")
    slots = draw_slots("distinct", num_rows=ROWS, num_slots=SLOTS, order=order)
    x, y = linear.rows(ROWS)

    got = linear.run(make_ops(), slots, x, y)

    sick = [row for row, slot in enumerate(slots) if slot == 2]
    sound = [row for row, slot in enumerate(slots) if slot != 2]
    assert got[sick].isnan().any()
    assert_close(got[sound], linear.expected(slots, x, y)[sound])


@pytest.mark.parametrize("make_ops", OPS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_stays_alone(
    make_ops: type[LoraOps], value: float, order: Order
) -> None:
    linear = loaded((8,))
    slots = draw_slots("uniform", num_rows=ROWS, num_slots=SLOTS, order=order)
    x, y = linear.rows(ROWS)
    x[4], y[4] = value, value

    got = linear.run(make_ops(), slots, x, y)

    others = [row for row in range(ROWS) if row != 4]
    assert_close(got[others], linear.expected(slots, x, y)[others])


@pytest.mark.parametrize("make_ops", OPS)
def test_a_slot_that_was_rewritten_is_seen(make_ops: type[LoraOps]) -> None:
    linear = AdaptedLinear(53, (41,), SLOTS)
    linear.load(Slot(0), (4,))
    linear.load(Slot(1), (8,))
    slots = [Slot(0), Slot(1), Slot(1), BASE]
    x, y = linear.rows(4)
    ops = make_ops()
    before = linear.run(ops, slots, x, y)

    linear.clear(Slot(1))
    linear.load(Slot(1), (3,))
    after = linear.run(ops, slots, x, y)

    assert differs(after, before) == [1, 2]
    assert_close(after, linear.expected(slots, x, y))


@pytest.mark.parametrize("make_ops", OPS)
def test_weights_are_found_after_they_have_moved(make_ops: type[LoraOps]) -> None:
    one_block = (8 * 56 + 41 * 8) * 4
    linear = AdaptedLinear(53, (41,), SLOTS, arena_bytes=3 * one_block)
    for slot in range(3):
        linear.load(Slot(slot), (8,))
    ops = make_ops()
    x, y = linear.rows(4)
    linear.run(ops, [Slot(0), Slot(1), Slot(2), BASE], x, y)
    start = linear.store.start_of(Slot(1))

    linear.clear(Slot(0))
    linear.clear(Slot(2))
    linear.load(Slot(3), (16,))

    assert linear.store.start_of(Slot(1)) != start, "nothing has moved"
    slots = [Slot(1), Slot(1), Slot(3), BASE]
    assert_close(linear.run(ops, slots, x, y), linear.expected(slots, x, y))


@pytest.mark.parametrize("make_ops", OPS)
def test_one_op_serves_steps_of_changing_adapters(make_ops: type[LoraOps]) -> None:
    linear = loaded((8, 1, 33), out_features=(40, 17, 341))
    ops = make_ops()
    x, y = linear.rows(ROWS)
    for seed in range(12):
        popularity = POPULARITIES[seed % len(POPULARITIES)]
        slots = draw_slots(popularity, num_rows=ROWS, num_slots=SLOTS, order="sorted", seed=seed)
        assert_close(linear.run(ops, slots, x, y), linear.expected(slots, x, y))
