"""The Triton kernels against the formula: under the interpreter here, compiled on a GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from loramux.lora.segments import padded_rows
from loramux.ops.tiles import FEW_ADAPTERS, MIDDLE_FROM
from loramux.ops.triton_lora import TritonOps
from loramux.types import Slot
from tests.cpu.adapted_linear import AdaptedLinear, assert_close, bits, load_slots
from tests.cpu.popularity import POPULARITIES, draw_slots

SLOTS = 4
BASE = Slot(SLOTS)
RANKS = {
    "rank 1": (1, 1, 1),
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
    out_features: tuple[int, ...] = (40, 17, 341),
) -> AdaptedLinear:
    """A linear of odd sizes; every second adapter leaves one module out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vector = torch.linspace(-2, 2, sum(out_features)).to(dtype) if bias else None
    linear = AdaptedLinear(53, out_features, SLOTS, dtype, vector, device=device)
    return load_slots(linear, ranks, dora=dora)


@cache
def ops(linear: AdaptedLinear) -> TritonOps:
    return TritonOps(
        padded_rows=padded_rows(SLOTS, linear.max_tokens),
        max_rank=128,
        device=linear.device,
    )


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_follow_the_formula(
    dtype: torch.dtype, ranks: tuple[int, ...], popularity: str
) -> None:
    linear = loaded(ranks, dtype=dtype)
    slots = draw_slots(popularity, num_rows=9, num_slots=SLOTS, order="interleaved")
    x, y = linear.rows(len(slots))
    got = linear.run(ops(linear), slots, x, y)
    assert_close(got, linear.expected(slots, x, y))
    for row, slot in enumerate(slots):
        if slot == BASE:
            assert torch.equal(bits(got[row]), bits(y[row]))


@pytest.mark.parametrize("bias", [False, True])
def test_dora_scales_everything_but_the_bias(bias: bool) -> None:
    linear = loaded((8, 24, 3), dora=True, bias=bias)
    slots = draw_slots("mixed", num_rows=8, num_slots=SLOTS, order="interleaved")
    x, y = linear.rows(len(slots))
    assert_close(linear.run(ops(linear), slots, x, y), linear.expected(slots, x, y))


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_the_delta_form_leaves_every_bit_where_there_is_no_adapter(popularity: str) -> None:
    linear = loaded((8, 1, 33), dtype=torch.bfloat16)
    slots = draw_slots(popularity, num_rows=9, num_slots=SLOTS, order="interleaved")
    x, y = linear.rows(len(slots))
    delta = torch.full_like(y, torch.nan)
    linear.routing.fill(slots, [1] * len(slots))
    ops(linear).lora_delta_(
        delta, x, linear.site, linear.store.arena, linear.tables, linear.routing
    )
    assert_close(y + delta, linear.expected(slots, x, y))
    for row, slot in enumerate(slots):
        if slot == BASE:
            assert torch.equal(bits((y + delta)[row]), bits(y[row]))


@pytest.mark.parametrize("num_rows", [9, MIDDLE_FROM, MIDDLE_FROM + 30])
@pytest.mark.parametrize("rank", [8, 24, 100])
def test_a_few_of_many_adapters_have_longer_segments(rank: int, num_rows: int) -> None:
    num_slots = 2 * FEW_ADAPTERS
    linear = AdaptedLinear(53, (40, 17), num_slots, max_tokens=200, device=loaded((8,)).device)
    load_slots(linear, (rank, rank))
    few_ops = TritonOps(
        padded_rows=padded_rows(num_slots, linear.max_tokens), max_rank=128, device=linear.device
    )
    few_ops.begin_step(rank, few=True)
    mix = [Slot(slot) for slot in (7, 1, num_slots, 4, 1, 2)]
    slots = [mix[row % len(mix)] for row in range(num_rows)]
    x, y = linear.rows(num_rows)
    got = linear.run(few_ops, slots, x, y, few=True)
    assert linear.routing.device_segments.block_rows == (16 if num_rows < MIDDLE_FROM else 32)
    assert_close(got, linear.expected(slots, x, y))
    base = [row for row, slot in enumerate(slots) if slot == num_slots]
    assert torch.equal(bits(got[base]), bits(y[base]))


def test_segments_longer_than_a_tile_are_cut() -> None:
    linear = loaded((8, 1, 33))
    slots = [Slot(1)] * 35 + [BASE] * 3
    x, y = linear.rows(len(slots))
    assert_close(linear.run(ops(linear), slots, x, y), linear.expected(slots, x, y))


def test_another_adapter_s_nan_stays_in_its_rows() -> None:
    linear = AdaptedLinear(53, (40,), SLOTS, device=loaded((8, 1, 33)).device)
    linear.load(Slot(0), [8], poison="b")
    linear.load(Slot(1), [8])
    x, y = linear.rows(6)
    got = linear.run(ops(linear), [Slot(s) for s in (0, 1, SLOTS, 1, 0, 1)], x, y)
    assert got[[1, 2, 3, 5]].isfinite().all()
    assert got[[0, 4]].isnan().any(dim=1).all()


def test_a_padded_bucket_computes_the_same(device: torch.device) -> None:
    linear = loaded((8, 1, 33))
    slots = draw_slots("mixed", num_rows=5, num_slots=SLOTS, order="interleaved")
    x, y = linear.rows(16)
    result = y.clone()
    linear.routing.fill(slots, [1] * len(slots), num_rows=16)
    ops(linear).lora_add_(result, x, linear.site, linear.store.arena, linear.tables, linear.routing)
    assert_close(result[:5], linear.expected(slots, x[:5], y[:5]))
    assert torch.equal(bits(result[5:]), bits(y[5:]))


@pytest.mark.parametrize("rank_bucket", [64, 128])
def test_a_sequence_may_have_several_rows_of_a_step(rank_bucket: int) -> None:
    """As with speculation: routing is by sequence, the op works by row."""
    linear = loaded((8, 1, 33))
    speculating = ops(linear)
    speculating.begin_step(rank_bucket, few=False)
    sequences = [Slot(2), BASE, Slot(0), Slot(2), Slot(1)]
    tokens = [3, 2, 5, 1, 4]
    rows = [slot for slot, count in zip(sequences, tokens, strict=True) for _ in range(count)]
    x, y = linear.rows(len(rows))
    result = y.clone()
    linear.routing.fill(sequences, tokens)
    speculating.lora_add_(result, x, linear.site, linear.store.arena, linear.tables, linear.routing)
    assert_close(result, linear.expected(rows, x, y))
    base = [row for row, slot in enumerate(rows) if slot == BASE]
    assert torch.equal(bits(result[base]), bits(y[base]))
