"""A mixture's experts as Triton kernels: who goes where, the base's products, and what joins them.

A pair is a token and one of the experts chosen for it; pair p is choice p % TOP_K of token
p // TOP_K. Whatever is computed stands in rows by pair; sorted, by expert and slot, is only the
order in which programs take them. So a program has rows of one expert, or of one expert and slot.

A base row's bits hang on the size of the step alone: every row of a product is summed up by itself,
in an order that the tiles say, whichever rows share its program.

Who goes where is found on the device, because the router has just said it. Grids are those of the
worst case, and programs without rows end at once.

What differs from step to step is kept from specialising the kernels: one that is compiled for a new
size would make that step wait.
"""

from __future__ import annotations

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from loramux.ops import layout
from loramux.ops.triton_kernels import sum_planes

RANK = tl.constexpr(layout.RANK)
OFFSET_B = tl.constexpr(layout.OFFSET_B)
OFFSET_G = tl.constexpr(layout.OFFSET_G)
RECORD = tl.constexpr(layout.RECORD)
NO_GAIN = tl.constexpr(layout.NO_GAIN)
EXPERT_PARTS = tl.constexpr(layout.EXPERT_PARTS)

NUM_FIELDS = 6
"""Of what ``rank_kernel`` finds for each place in the sorted order: the expert, how far its run is
from its start and how much of it is left; then the same of the run of expert and slot."""


@triton.jit(do_not_specialize=["num_pairs"])
def rank_kernel(
    index,  # [T, TOP_K] int64: the experts that the router has chosen
    token_slot,  # [T]
    order,  # [pairs] int32, out: pairs in sorted order
    tokens,  # [pairs] int32, out: their tokens
    found,  # [6, pairs] int32, out
    num_pairs,
    num_columns,  # slots + 1
    TOP_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,  # else all pairs are the base's
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A pair's place is the number of pairs before it: counted, for up to some thousands of pairs.

    Grid (blocks of pairs). A run of expert and slot is called by the place of its gate's record,
    counted in records from that of expert 0 and slot 0.
    """
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    expert = tl.load(index + pairs, mask=mask, other=0).to(tl.int32)
    slot = tl.zeros((BLOCK,), tl.int32)
    if HAS_SLOTS:
        slot = tl.load(token_slot + pairs // TOP_K, mask=mask, other=0)
    first_key = expert * num_columns
    key = first_key + slot
    place = tl.zeros((BLOCK,), tl.int32)
    run_start, run_end, expert_start, expert_end = place, place, place, place
    for start in range(0, num_pairs, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_mask = others < num_pairs
        other_expert = tl.load(index + others, mask=other_mask, other=0).to(tl.int32)
        other_key = other_expert * num_columns
        if HAS_SLOTS:
            other_key += tl.load(token_slot + others // TOP_K, mask=other_mask, other=0)
        other_key = tl.where(other_mask, other_key, 0x7FFFFFFF)[None, :]
        before = other_key < key[:, None]
        stable = before | ((other_key == key[:, None]) & (others[None, :] < pairs[:, None]))
        place += tl.sum(stable.to(tl.int32), 1)
        run_start += tl.sum(before.to(tl.int32), 1)
        run_end += tl.sum((other_key <= key[:, None]).to(tl.int32), 1)
        expert_start += tl.sum((other_key < first_key[:, None]).to(tl.int32), 1)
        expert_end += tl.sum((other_key < (first_key + num_columns)[:, None]).to(tl.int32), 1)
    tl.store(order + place, pairs, mask=mask)
    tl.store(tokens + place, pairs // TOP_K, mask=mask)
    target = found + place
    tl.store(target, expert, mask=mask)
    tl.store(target + num_pairs, place - expert_start, mask=mask)
    tl.store(target + 2 * num_pairs, expert_end - place, mask=mask)
    tl.store(target + 3 * num_pairs, first_key * EXPERT_PARTS + slot, mask=mask)
    tl.store(target + 4 * num_pairs, place - run_start, mask=mask)
    tl.store(target + 5 * num_pairs, run_end - place, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "capacity", "expert_rows", "run_rows"])
def cut_kernel(
    found,  # [6, pairs]
    pieces,  # [2, 3, capacity] int32, out: of experts, then of runs: which one, start and rows
    num_pairs,
    capacity,
    expert_rows,
    run_rows,
    CHUNK: tl.constexpr,
):
    """Cuts runs to pieces of at most so many rows. Grid (1) or, with slots, (2)."""
    which = tl.program_id(0)
    rows = tl.where(which == 0, expert_rows, run_rows)
    found += which * 3 * num_pairs
    pieces += which * 3 * capacity
    count = 0
    for start in range(0, num_pairs, CHUNK):
        places = start + tl.arange(0, CHUNK)
        mask = places < num_pairs
        at = tl.load(found + num_pairs + places, mask=mask, other=1)
        begins = mask & (at % rows == 0)
        target = pieces + count + tl.cumsum(begins.to(tl.int32), 0) - 1
        left = tl.load(found + 2 * num_pairs + places, mask=mask, other=0)
        tl.store(target, tl.load(found + places, mask=mask, other=0), mask=begins)
        tl.store(target + capacity, places, mask=begins)
        tl.store(target + 2 * capacity, tl.minimum(left, rows), mask=begins)
        count += tl.sum(begins.to(tl.int32), 0)
    # Kernels load what belongs to a piece before they know whether it has rows.
    nothing = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, capacity, CHUNK):
        unused = start + tl.arange(0, CHUNK)
        mask = (unused >= count) & (unused < capacity)
        tl.store(pieces + unused, nothing, mask=mask)
        tl.store(pieces + capacity + unused, nothing, mask=mask)
        tl.store(pieces + 2 * capacity + unused, nothing, mask=mask)


@triton.jit
def product_kernel(
    x,  # [T, K], or [pairs, K]
    weight,  # [experts, N, K]
    y,  # [pairs, N], out
    order,
    piece_expert,
    piece_start,
    piece_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,  # TOP_K where x has a row for each token, else 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[p] = W[expert of p] x[p // PAIRS_PER_ROW]. Grid (pieces, column tiles): an expert's pieces
    stand side by side and share its weights in the cache."""
    piece = tl.program_id(0)
    num_rows = tl.load(piece_rows + piece)
    expert = tl.load(piece_expert + piece).to(tl.int64)
    start = tl.load(piece_start + piece)
    if num_rows == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    pairs = tl.load(order + start + rows, mask=row_mask, other=0).to(tl.int64)
    x_rows = x + (pairs // PAIRS_PER_ROW)[:, None] * x_stride
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = columns < N
    w_rows = weight + expert * N * K + columns[None, :] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            x_tile = tl.load(x_rows + k[None, :], mask=row_mask[:, None], other=0.0)
            w_tile = tl.load(w_rows + k[:, None], mask=column_mask[None, :], other=0.0)
        else:
            x_mask = row_mask[:, None] & (k < K)[None, :]
            w_mask = column_mask[None, :] & (k < K)[:, None]
            x_tile = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
            w_tile = tl.load(w_rows + k[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(x_tile.to(DOT), w_tile.to(DOT), acc, input_precision=PRECISION)
    target = y + pairs[:, None] * N + columns[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def gate_kernel(
    both,  # [pairs, 2 * SIZE]: what the base's gate and up make
    hidden,  # [pairs, SIZE], out
    planes,  # [SPLIT_K, 2, plane_rows, plane_ranks] float32: A x of gate and up
    arena,
    table,  # gate and up of expert 0: [2, slots + 1, 4], rows of the slot tables
    order,
    piece_run,
    piece_start,
    piece_rows,
    num_pairs,
    table_stride,
    plane_rows,
    plane_ranks,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LORA: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden = act(gate) * up, where gate and up have their deltas. Grid (pieces, column tiles).

    Without LoRA a piece is BLOCK_M pairs in their own order.
    """
    piece = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    run = 0
    if LORA:
        num_rows = tl.load(piece_rows + piece)
        start = tl.load(piece_start + piece)
        run = tl.load(piece_run + piece)
        if num_rows == 0:
            return
        row_mask = rows < num_rows
        pairs = tl.load(order + start + rows, mask=row_mask, other=0).to(tl.int64)
    else:
        pairs = (piece * BLOCK_M + rows).to(tl.int64)
        row_mask = pairs < num_pairs
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row_mask[:, None] & (columns < SIZE)[None, :]
    source = both + pairs[:, None] * (2 * SIZE) + columns[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    if LORA:
        record = table + run.to(tl.int64) * RECORD
        h_rows = planes + (piece * BLOCK_M + rows[:, None]).to(tl.int64) * plane_ranks
        plane_size = plane_rows.to(tl.int64) * plane_ranks
        gate = _with_delta(
            gate, h_rows, plane_size, row_mask, arena, record, columns, 0, SIZE, UNIT, SPLIT_K,
            BLOCK_M, BLOCK_N, BLOCK_R, DOT, PRECISION,
        )  # fmt: skip
        up = _with_delta(
            up, h_rows, plane_size, row_mask, arena, record + table_stride, columns, 1, SIZE, UNIT,
            SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, DOT, PRECISION,
        )  # fmt: skip
    # Rounded where the modelling code rounds.
    element: tl.constexpr = hidden.dtype.element_ty
    active = _activate(gate, ACTIVATION).to(element).to(tl.float32)
    target = hidden + pairs[:, None] * SIZE + columns[None, :]
    tl.store(target, (active * up).to(element), mask=mask)


@triton.jit
def _with_delta(
    y,  # [BLOCK_M, BLOCK_N] float32
    h_rows,
    plane_size,
    row_mask,
    arena,
    record,
    columns,
    PART: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """g * (y + B h), or y as it is where there are no weights."""
    r = tl.load(record + RANK).to(tl.int32)
    if r > 0:
        b = arena + tl.load(record + OFFSET_B) * UNIT
        offset_g = tl.load(record + OFFSET_G)
        r_pad = (r + 7) // 8 * 8
        column_mask = columns < SIZE
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for rank_start in range(0, r, BLOCK_R):
            ranks = rank_start + tl.arange(0, BLOCK_R)
            h = sum_planes(h_rows, plane_size, row_mask, ranks, PART, 2, SPLIT_K, BLOCK_M, BLOCK_R)
            b_tile = tl.load(
                b + columns[None, :] * r_pad + ranks[:, None],
                mask=column_mask[None, :] & (ranks[:, None] < r_pad),
                other=0.0,
            )
            acc = tl.dot(h.to(DOT), b_tile.to(DOT), acc, input_precision=PRECISION)
        y += acc
        if offset_g != NO_GAIN:
            gain = tl.load(arena + offset_g * UNIT + columns, mask=column_mask, other=1.0)
            y *= gain.to(tl.float32)[None, :]
    return y


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2.0 * inner)  # (1 + tanh(z)) / 2 is sigmoid(2 z)


@triton.jit
def combine_kernel(
    y,  # [pairs, SIZE]: what the experts make
    weights,  # [T, TOP_K]: the router's
    out,  # [T, SIZE], out
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[t] = sum of weight times y over t's pairs, in the router's order. Grid (T, tiles)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < SIZE
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        value = tl.load(y + pair * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weights + pair).to(tl.float32) * value
    tl.store(out + token * SIZE + columns, acc.to(out.dtype.element_ty), mask=mask)
