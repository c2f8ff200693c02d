"""Deltas of a mixture's experts pair by pair, in the launches that the base needs anyway.

For steps in which a run of expert and slot has a row or two; ``expert_kernels`` says the rest. The
same launches are the base's where no adapter takes part.
"""

from __future__ import annotations

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from loramux.ops import layout
from loramux.ops.expert_kernels import load_gate_and_up, store_gated

RANK = tl.constexpr(layout.RANK)
OFFSET_B = tl.constexpr(layout.OFFSET_B)
OFFSET_G = tl.constexpr(layout.OFFSET_G)
RECORD = tl.constexpr(layout.RECORD)
NO_GAIN = tl.constexpr(layout.NO_GAIN)


@triton.jit(do_not_specialize=["most_pairs"])
def gate_kernel(
    both,  # [pairs, 2 * SIZE]: what the base's gate and up make
    hidden,  # [pairs, SIZE], out
    planes,  # [SPLIT_K, 2, plane_rows, plane_ranks] float32: A x of gate and up
    arena,
    table,  # gate and up of expert 0: [2, slots + 1, 4], rows of the slot tables
    by_pair,  # [2, most pairs]: rows in the planes, and records
    token_count,
    most_pairs,
    plane_rows,
    plane_ranks,
    table_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LORA: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,  # 1 with LoRA
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """hidden = act(gate) * up, where gate and up have their deltas, pair by pair.

    Grid (blocks of pairs, column tiles).
    """
    num_pairs = tl.load(token_count) * TOP_K
    first = tl.program_id(0) * BLOCK_M
    if first >= num_pairs:
        return
    pairs = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (pairs < num_pairs)[:, None] & (columns < SIZE)[None, :]
    gate, up = load_gate_and_up(both, pairs, columns, mask, SIZE)
    if LORA:
        place = tl.load(by_pair + first)
        record = table + tl.load(by_pair + most_pairs + first).to(tl.int64) * RECORD
        h_row = planes + place.to(tl.int64) * plane_ranks
        plane_size = plane_rows.to(tl.int64) * plane_ranks
        for_gate = _row_delta(
            h_row, plane_size, arena, record, columns, 0, 2, SIZE, UNIT, SPLIT_K, BLOCK_N, BLOCK_R,
            ONE_BLOCK,
        )  # fmt: skip
        for_up = _row_delta(
            h_row, plane_size, arena, record + table_stride, columns, 1, 2, SIZE, UNIT, SPLIT_K,
            BLOCK_N, BLOCK_R, ONE_BLOCK,
        )  # fmt: skip
        gate = _add_row_delta(gate, for_gate)
        up = _add_row_delta(up, for_up)
    store_gated(gate, up, hidden, pairs, columns, mask, SIZE, ACTIVATION)


@triton.jit(do_not_specialize=["most_pairs"])
def combine_kernel(
    y,  # [pairs, SIZE]: what the base's experts make
    weights,  # [T, TOP_K]: the router's
    out,  # [T, SIZE], out
    planes,  # [SPLIT_K, 1, plane_rows, plane_ranks] float32: A x of down
    arena,
    table,  # down of expert 0: [1, slots + 1, 4]
    by_pair,
    token_count,
    most_pairs,
    plane_rows,
    plane_ranks,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    LORA: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """out[t] = sum of weight times y over t's pairs, in the router's order; with LoRA y has its
    delta. Padding becomes 0. Grid (T, column tiles)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < SIZE
    target = out + token * SIZE + columns
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if token >= tl.load(token_count):
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
        return
    y += token * TOP_K * SIZE
    weights += token * TOP_K
    # All loads first: what adds deltas has barriers, which later loads would wait for.
    values = ()
    factors = ()
    for choice in tl.static_range(TOP_K):
        values += (tl.load(y + choice * SIZE + columns, mask=mask, other=0.0),)
        factors += (tl.load(weights + choice),)
    if LORA:
        by_pair += token * TOP_K
        change, highest = _sum_of_deltas(
            y, weights, planes, arena, table, by_pair, by_pair + most_pairs, columns, plane_rows,
            plane_ranks, SIZE, TOP_K, UNIT, SPLIT_K, BLOCK_N, BLOCK_R, ONE_BLOCK,
        )  # fmt: skip
    for choice in tl.static_range(TOP_K):
        acc += factors[choice].to(tl.float32) * values[choice].to(tl.float32)
    if LORA:
        # The base's rows keep their sum as it is.
        acc = tl.where(highest > 0, acc + change, acc)
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of_deltas(
    y,
    weights,
    planes,
    arena,
    table,
    places,
    records,
    columns,
    plane_rows,
    plane_ranks,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """What LoRA changes of one token's sum, ``[BLOCK_N]``, and the highest rank of its pairs.

    Products are added up element by element, over all pairs, and then once over the ranks.
    """
    highest = 0
    one_by_one = 0 if ONE_BLOCK else 1
    products = tl.zeros((BLOCK_N, BLOCK_R), dtype=tl.float32)
    plane_size = plane_rows.to(tl.int64) * plane_ranks
    column_mask = columns < SIZE
    ranks = tl.arange(0, BLOCK_R)
    for choice in tl.static_range(TOP_K):
        record = table + tl.load(records + choice).to(tl.int64) * RECORD
        h_row = planes + tl.load(places + choice).to(tl.int64) * plane_ranks
        r = tl.load(record + RANK).to(tl.int32)
        b = arena + tl.load(record + OFFSET_B) * UNIT
        one_by_one += tl.where(tl.load(record + OFFSET_G) != NO_GAIN, 1, 0)
        highest = tl.maximum(highest, r)
        if ONE_BLOCK:
            h = _sum_row(h_row, plane_size, r > 0, ranks, 0, 1, SPLIT_K, BLOCK_R)
            h *= tl.load(weights + choice).to(tl.float32)
            products += _products(b, h, columns, column_mask, ranks, r)
    if one_by_one > 0:
        change = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for pair in range(TOP_K):
            at = table + tl.load(records + pair).to(tl.int64) * RECORD
            h_at = planes + tl.load(places + pair).to(tl.int64) * plane_ranks
            delta, gain, _ = _row_delta(
                h_at, plane_size, arena, at, columns, 0, 1, SIZE, UNIT, SPLIT_K, BLOCK_N,
                BLOCK_R, ONE_BLOCK,
            )  # fmt: skip
            value = tl.load(y + pair * SIZE + columns, mask=column_mask, other=0.0)
            delta = gain * delta + (gain - 1.0) * value.to(tl.float32)
            change += tl.load(weights + pair).to(tl.float32) * delta
    else:
        change = tl.sum(products, 1)
    return change, highest


@triton.jit
def _row_delta(
    h_row,
    plane_size,
    arena,
    record,
    columns,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # no rank is above BLOCK_R
):
    """What ``_add_row_delta`` takes: B h and g, both ``[BLOCK_N]``, and the rank.

    A program that needs several asks for all of them before it adds the first: adding is a barrier,
    which later loads would wait for. So there are no branches either, if one block has all ranks.
    """
    r = tl.load(record + RANK).to(tl.int32)
    b = arena + tl.load(record + OFFSET_B) * UNIT
    offset_g = tl.load(record + OFFSET_G)
    column_mask = columns < SIZE
    ranks = tl.arange(0, BLOCK_R)
    if ONE_BLOCK:
        h = _sum_row(h_row, plane_size, r > 0, ranks, PART, NUM_PARTS, SPLIT_K, BLOCK_R)
        delta = tl.sum(_products(b, h, columns, column_mask, ranks, r), 1)
    else:
        delta = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for first in range(0, r, BLOCK_R):
            h = _sum_row(h_row, plane_size, r > 0, first + ranks, PART, NUM_PARTS, SPLIT_K, BLOCK_R)
            delta += tl.sum(_products(b, h, columns, column_mask, first + ranks, r), 1)
    with_gain = columns < tl.where(offset_g != NO_GAIN, SIZE, 0)
    gain = tl.load(arena + offset_g * UNIT + columns, mask=with_gain, other=1.0).to(tl.float32)
    return delta, gain, r


@triton.jit
def _add_row_delta(y, found):
    """g * (y + B h), or y ``[1, BLOCK_N]`` float32 as it is where there are no weights."""
    delta, gain, r = found
    return tl.where(r > 0, gain[None, :] * (y + delta[None, :]), y)


@triton.jit
def _sum_row(
    h_row,
    plane_size,
    used,
    ranks,
    PART: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A x of one pair, ``[BLOCK_R]``, or zeros."""
    # Masked as a whole: beyond the rank there are zeros, and to mask these would make small loads.
    mask = tl.arange(0, BLOCK_R) < tl.where(used, BLOCK_R, 0)
    h = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for split in tl.static_range(SPLIT_K):
        source = h_row + (split * NUM_PARTS + PART) * plane_size + ranks
        h += tl.load(source, mask=mask, other=0.0)
    return h


@triton.jit
def _products(b, h, columns, column_mask, ranks, r):
    """B times h of some columns and ranks, ``[BLOCK_N, BLOCK_R]``; zeros beyond what there is."""
    r_pad = (r + 7) // 8 * 8
    mask = column_mask[:, None] & (ranks < r_pad)[None, :]
    b_tile = tl.load(b + columns[:, None] * r_pad + ranks[None, :], mask=mask, other=0.0)
    return b_tile.to(tl.float32) * h[None, :]
