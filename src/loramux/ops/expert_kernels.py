"""A mixture's experts as Triton kernels: the base's products, and what joins them.

Whatever is computed stands in rows by pair of token and expert (``expert_routing_kernels``); sorted
is only the order in which programs take them. So a program has rows of one expert, or of one expert
and slot. Grids are those of the worst case, and programs without rows end at once.

Deltas are added here by runs of expert and slot, by matrix products; where runs are a row or two,
pair by pair (``expert_pair_kernels``).

A base row's bits hang on the size of the step alone: every row of a product is summed up by itself,
in an order that the tiles say, whichever rows share its program.
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


@triton.jit
def product_kernel(
    x,  # [T, K], or [pairs, K]
    weight,  # [experts, N, K]
    y,  # [pairs, N], out
    order,
    piece_expert,  # or, where each pair is a piece, index [T, TOP_K]
    piece_start,
    piece_rows,
    token_count,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,  # TOP_K where x has a row for each token, else 1
    ALONE: tl.constexpr,  # each pair is a piece
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[p] = W[expert of p] x[p // PAIRS_PER_ROW]. Grid (pieces, column tiles): an expert's pieces
    stand side by side and share its weights in the cache."""
    piece = tl.program_id(0)
    expert = tl.load(piece_expert + piece).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    if ALONE:
        num_rows = (piece < tl.load(token_count) * TOP_K).to(tl.int32)
        row_mask = rows < num_rows
        pairs = (piece + tl.zeros((BLOCK_M,), tl.int32)).to(tl.int64)
    else:
        num_rows = tl.load(piece_rows + piece)
        start = tl.load(piece_start + piece)
        row_mask = rows < num_rows
        pairs = tl.load(order + start + rows, mask=row_mask, other=0).to(tl.int64)
    if num_rows == 0:
        return
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


@triton.jit
def gate_runs_kernel(
    both,  # [pairs, 2 * SIZE]
    hidden,  # [pairs, SIZE], out
    planes,
    arena,
    table,
    order,
    piece_run,
    piece_start,
    piece_rows,
    table_stride,
    plane_rows,
    plane_ranks,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden = act(gate) * up, where gate and up have their deltas, by runs of expert and slot.

    Grid (pieces, column tiles).
    """
    piece = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    num_rows = tl.load(piece_rows + piece)
    start = tl.load(piece_start + piece)
    run = tl.load(piece_run + piece)
    if num_rows == 0:
        return
    row_mask = rows < num_rows
    pairs = tl.load(order + start + rows, mask=row_mask, other=0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row_mask[:, None] & (columns < SIZE)[None, :]
    gate, up = load_gate_and_up(both, pairs, columns, mask, SIZE)
    record = table + run.to(tl.int64) * RECORD
    h_rows = planes + (piece * BLOCK_M + rows[:, None]).to(tl.int64) * plane_ranks
    plane_size = plane_rows.to(tl.int64) * plane_ranks
    gate = _rows_with_delta(
        gate, h_rows, plane_size, row_mask, arena, record, columns, 0, SIZE, UNIT, SPLIT_K,
        BLOCK_M, BLOCK_N, BLOCK_R, DOT, PRECISION,
    )  # fmt: skip
    up = _rows_with_delta(
        up, h_rows, plane_size, row_mask, arena, record + table_stride, columns, 1, SIZE, UNIT,
        SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, DOT, PRECISION,
    )  # fmt: skip
    store_gated(gate, up, hidden, pairs, columns, mask, SIZE, ACTIVATION)


@triton.jit
def load_gate_and_up(both, pairs, columns, mask, SIZE: tl.constexpr):
    """What the base's product has made of some pairs, as float32."""
    source = both + pairs[:, None] * (2 * SIZE) + columns[None, :]
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    return gate, tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_gated(
    gate, up, hidden, pairs, columns, mask, SIZE: tl.constexpr, ACTIVATION: tl.constexpr
):
    """act(gate) * up, rounded where the modelling code rounds."""
    element: tl.constexpr = hidden.dtype.element_ty
    active = _activate(gate, ACTIVATION).to(element).to(tl.float32)
    target = hidden + pairs[:, None] * SIZE + columns[None, :]
    tl.store(target, (active * up).to(element), mask=mask)


@triton.jit
def _rows_with_delta(
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
