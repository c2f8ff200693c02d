"""The LoRA op as two Triton kernels: shrink (A x, in split-K planes) and expand (B h, onto y).

Both work by segments: at most BLOCK_M rows of one slot, found on the host once a step. A segment
without rows ends at once, so the grid depends on the size of the batch and never on who is in it.
Nothing is added atomically: shrink writes each split's partial sums to a plane of its own, and
expand adds the planes in their order. Planes need no clearing, because expand reads only what
shrink has written in this launch.

Weights are reached by arithmetic from the arena's pointer: offsets count in units of 16 bytes and
row strides are multiples of 8 elements, which the compiler sees, so every load is a full vector.

DOT is the type that products are computed in: that of the weights, but float32 in the interpreter,
which knows no bfloat16 products.
"""

from __future__ import annotations

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from loramux.ops import layout

OFFSET_A = tl.constexpr(layout.OFFSET_A)
OFFSET_B = tl.constexpr(layout.OFFSET_B)
OFFSET_G = tl.constexpr(layout.OFFSET_G)
RANK = tl.constexpr(layout.RANK)
RECORD = tl.constexpr(layout.RECORD)
NO_GAIN = tl.constexpr(layout.NO_GAIN)


@triton.jit
def shrink_kernel(
    x,  # [T, K]
    planes,  # [SPLIT_K, NUM_SLICES, plane_rows, plane_ranks] float32
    arena,
    table,  # [NUM_SLICES, slots + 1, 4], rows of the slot tables
    segment_slot,
    segment_start,
    segment_rows,
    sorted_rows,
    x_stride,
    table_stride,
    plane_rows,
    plane_ranks,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """planes[split, slice, segment * BLOCK_M + i, j] = sum over the split of A[j, k] x[row i, k].

    Grid (segments, slices * rank blocks, splits).
    """
    segment = tl.program_id(0)
    part = tl.program_id(1) % NUM_SLICES
    rank_start = tl.program_id(1) // NUM_SLICES * BLOCK_R
    split = tl.program_id(2)
    # Loads before branches: what one load must wait for another, a block of little work waits for.
    num_rows = tl.load(segment_rows + segment)
    slot = tl.load(segment_slot + segment)
    start = tl.load(segment_start + segment)
    record = table + part * table_stride + slot * RECORD
    r = tl.load(record + RANK).to(tl.int32)
    offset = tl.load(record + OFFSET_A)
    if (num_rows == 0) | (rank_start >= r):
        return
    a = arena + offset * UNIT

    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    row_ids = tl.load(sorted_rows + start + rows, mask=row_mask, other=0).to(tl.int64)
    ranks = rank_start + tl.arange(0, BLOCK_R)
    rank_mask = ranks < r

    BLOCKS: tl.constexpr = (K_PAD + BLOCK_K - 1) // BLOCK_K
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLIT_K - 1) // SPLIT_K
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for block in range(PER_SPLIT):
        k = (split * PER_SPLIT + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        x_tile = tl.load(
            x + row_ids[:, None] * x_stride + k[None, :],
            mask=row_mask[:, None] & (k[None, :] < K),
            other=0.0,
        )
        a_tile = tl.load(
            a + ranks[None, :] * K_PAD + k[:, None],
            mask=rank_mask[None, :] & (k[:, None] < K_PAD),
            other=0.0,
        )
        acc = tl.dot(x_tile.to(DOT), a_tile.to(DOT), acc, input_precision=PRECISION)

    plane = (split * NUM_SLICES + part) * plane_rows.to(tl.int64)
    target = planes + (plane + segment * BLOCK_M + rows[:, None]) * plane_ranks + ranks[None, :]
    # Beyond the rank there are zeros: a mask within a vector would make every store a small one.
    tl.store(target, acc, mask=row_mask[:, None])


@triton.jit
def expand_kernel(
    y,  # [T, N0 + N1 + N2]: the base's output, or the delta
    planes,
    arena,
    table,  # [NUM_SLICES, slots + 1, 4], rows of the slot tables
    bias,  # [N0 + N1 + N2] or y where there is none
    segment_slot,
    segment_start,
    segment_rows,
    sorted_rows,
    y_stride,
    table_stride,
    plane_rows,
    plane_ranks,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # divides shrink's, which fills whole blocks of ranks
    HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """In place: y = g * (y - bias + B h) + bias. Beside: y = B h, and -0.0 where there is none.

    h is the sum of the planes. Grid (segments, column tiles of all slices).
    """
    segment = tl.program_id(0)
    tile = tl.program_id(1)
    TILES0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    TILES1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    # Slice bounds are constants of each branch, so that columns stay aligned for the compiler.
    if tile < TILES0:
        _expand_tile(
            y, planes, arena, table, bias, segment_slot, segment_start,
            segment_rows, sorted_rows, y_stride, table_stride, plane_rows, plane_ranks, segment,
            tile, 0, 0, N0, NUM_SLICES, UNIT,
            SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BIAS, BESIDE, DOT, PRECISION,
        )  # fmt: skip
    elif tile < TILES0 + TILES1:
        _expand_tile(
            y, planes, arena, table, bias, segment_slot, segment_start,
            segment_rows, sorted_rows, y_stride, table_stride, plane_rows, plane_ranks, segment,
            tile - TILES0, 1, N0, N1, NUM_SLICES, UNIT,
            SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BIAS, BESIDE, DOT, PRECISION,
        )  # fmt: skip
    else:
        _expand_tile(
            y, planes, arena, table, bias, segment_slot, segment_start,
            segment_rows, sorted_rows, y_stride, table_stride, plane_rows, plane_ranks, segment,
            tile - TILES0 - TILES1, 2, N0 + N1, N2, NUM_SLICES, UNIT,
            SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, HAS_BIAS, BESIDE, DOT, PRECISION,
        )  # fmt: skip


@triton.jit
def _expand_tile(
    y,
    planes,
    arena,
    table,
    bias,
    segment_slot,
    segment_start,
    segment_rows,
    sorted_rows,
    y_stride,
    table_stride,
    plane_rows,
    plane_ranks,
    segment,
    tile,
    PART: tl.constexpr,
    COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,  # divides shrink's, which fills whole blocks of ranks
    HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of one slice: columns COLUMN + tile * BLOCK_N and on."""
    num_rows = tl.load(segment_rows + segment)
    slot = tl.load(segment_slot + segment)
    start = tl.load(segment_start + segment)
    record = table + PART * table_stride + slot * RECORD
    r = tl.load(record + RANK).to(tl.int32)
    offset = tl.load(record + OFFSET_B)
    offset_g = tl.load(record + OFFSET_G)
    if num_rows == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    row_ids = tl.load(sorted_rows + start + rows, mask=row_mask, other=0).to(tl.int64)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < SIZE
    target = y + row_ids[:, None] * y_stride + (COLUMN + n)[None, :]
    mask = row_mask[:, None] & n_mask[None, :]
    if r == 0:
        if BESIDE:
            # By its bits, because the compiler makes 0.0 of the number -0.0.
            if y.dtype.element_ty.primitive_bitwidth == 16:
                sign = tl.full((BLOCK_M, BLOCK_N), 0x8000, tl.uint16)
            else:
                sign = tl.full((BLOCK_M, BLOCK_N), 0x80000000, tl.uint32)
            tl.store(target, sign.to(y.dtype.element_ty, bitcast=True), mask=mask)
        return

    b = arena + offset * UNIT
    r_pad = (r + 7) // 8 * 8
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for rank_start in range(0, r, BLOCK_R):
        ranks = rank_start + tl.arange(0, BLOCK_R)
        h = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(SPLIT_K):
            plane = (split * NUM_SLICES + PART) * plane_rows.to(tl.int64)
            source = planes + (plane + segment * BLOCK_M + rows[:, None]) * plane_ranks
            h += tl.load(source + ranks[None, :], mask=row_mask[:, None], other=0.0)
        b_tile = tl.load(
            b + n[None, :] * r_pad + ranks[:, None],
            mask=n_mask[None, :] & (ranks[:, None] < r_pad),
            other=0.0,
        )
        acc = tl.dot(h.to(DOT), b_tile.to(DOT), acc, input_precision=PRECISION)
    if BESIDE:
        tl.store(target, acc.to(y.dtype.element_ty), mask=mask)
        return

    value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if offset_g != NO_GAIN:
        g = arena + offset_g * UNIT
        gain = tl.load(g + n, mask=n_mask, other=1.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            shift = tl.load(bias + COLUMN + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
            value = gain * (value - shift + acc) + shift
        else:
            value = gain * (value + acc)
    else:
        value += acc
    tl.store(target, value.to(y.dtype.element_ty), mask=mask)
