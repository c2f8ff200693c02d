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
    ONE_BLOCK: tl.constexpr,  # no rank is above BLOCK_R
    TILES: tl.constexpr,  # tiles of columns that one program works through
    HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """In place: y = g * (y - bias + B h) + bias. Beside: y = B h, and -0.0 where there is none.

    h is the sum of the planes. Grid (segments, groups of TILES column tiles of all slices).
    """
    segment = tl.program_id(0)
    group = tl.program_id(1)
    GROUP: tl.constexpr = BLOCK_N * TILES
    GROUPS0: tl.constexpr = (N0 + GROUP - 1) // GROUP
    GROUPS1: tl.constexpr = (N1 + GROUP - 1) // GROUP
    # Slice bounds are constants of each branch, so that columns stay aligned for the compiler.
    if group < GROUPS0:
        _expand_group(
            y, planes, arena, table, bias, segment_slot, segment_start, segment_rows, sorted_rows,
            y_stride, table_stride, plane_rows, plane_ranks, segment, group, 0, 0, N0, NUM_SLICES,
            UNIT, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, ONE_BLOCK, TILES, HAS_BIAS, BESIDE, DOT,
            PRECISION,
        )  # fmt: skip
    elif group < GROUPS0 + GROUPS1:
        _expand_group(
            y, planes, arena, table, bias, segment_slot, segment_start, segment_rows, sorted_rows,
            y_stride, table_stride, plane_rows, plane_ranks, segment, group - GROUPS0, 1, N0, N1,
            NUM_SLICES, UNIT, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, ONE_BLOCK, TILES, HAS_BIAS,
            BESIDE, DOT, PRECISION,
        )  # fmt: skip
    else:
        _expand_group(
            y, planes, arena, table, bias, segment_slot, segment_start, segment_rows, sorted_rows,
            y_stride, table_stride, plane_rows, plane_ranks, segment, group - GROUPS0 - GROUPS1, 2,
            N0 + N1, N2, NUM_SLICES, UNIT, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_R, ONE_BLOCK, TILES,
            HAS_BIAS, BESIDE, DOT, PRECISION,
        )  # fmt: skip


@triton.jit
def _expand_group(
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
    group,
    PART: tl.constexpr,
    COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """TILES tiles of one slice, from column COLUMN + group * TILES * BLOCK_N on."""
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
    target = y + row_ids[:, None] * y_stride + COLUMN
    first = group * TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    if r == 0:
        if BESIDE:
            # By its bits, because the compiler makes 0.0 of the number -0.0.
            if y.dtype.element_ty.primitive_bitwidth == 16:
                sign = tl.full((BLOCK_M, BLOCK_N), 0x8000, tl.uint16)
            else:
                sign = tl.full((BLOCK_M, BLOCK_N), 0x80000000, tl.uint32)
            for tile in tl.static_range(TILES):
                n = first + tile * BLOCK_N
                mask = row_mask[:, None] & (n < SIZE)[None, :]
                tl.store(target + n[None, :], sign.to(y.dtype.element_ty, bitcast=True), mask=mask)
        return

    b = arena + offset * UNIT
    r_pad = (r + 7) // 8 * 8
    h_rows = planes + (segment * BLOCK_M + rows[:, None]).to(tl.int64) * plane_ranks
    plane_size = plane_rows.to(tl.int64) * plane_ranks
    if ONE_BLOCK:
        ranks = tl.arange(0, BLOCK_R)
        h = sum_planes(
            h_rows, plane_size, row_mask, ranks, PART, NUM_SLICES, SPLIT_K, BLOCK_M, BLOCK_R
        ).to(DOT)
        # Tile after tile by one block: where and what its rows are is found once, and the next
        # tile of B is on its way while this one is multiplied.
        for tile in range(TILES):
            n = first + tile * BLOCK_N
            b_tile = tl.load(
                b + n[None, :] * r_pad + ranks[:, None],
                mask=(n < SIZE)[None, :] & (ranks[:, None] < r_pad),
                other=0.0,
            )
            acc = tl.dot(h, b_tile.to(DOT), input_precision=PRECISION)
            _add_delta(
                target, acc, n, row_mask, arena, offset_g, bias, COLUMN, SIZE, UNIT, HAS_BIAS,
                BESIDE,
            )  # fmt: skip
    else:
        for tile in range(TILES):
            n = first + tile * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for rank_start in range(0, r, BLOCK_R):
                ranks = rank_start + tl.arange(0, BLOCK_R)
                h = sum_planes(
                    h_rows, plane_size, row_mask, ranks, PART, NUM_SLICES, SPLIT_K, BLOCK_M, BLOCK_R
                )  # fmt: skip
                b_tile = tl.load(
                    b + n[None, :] * r_pad + ranks[:, None],
                    mask=(n < SIZE)[None, :] & (ranks[:, None] < r_pad),
                    other=0.0,
                )
                acc = tl.dot(h.to(DOT), b_tile.to(DOT), acc, input_precision=PRECISION)
            _add_delta(
                target, acc, n, row_mask, arena, offset_g, bias, COLUMN, SIZE, UNIT, HAS_BIAS,
                BESIDE,
            )  # fmt: skip


@triton.jit
def sum_planes(
    h_rows,
    plane_size,
    row_mask,
    ranks,
    PART: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A x of a segment's rows: the sum of what shrink's splits have found, in their order."""
    h = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for split in tl.static_range(SPLIT_K):
        source = h_rows + (split * NUM_SLICES + PART) * plane_size
        h += tl.load(source + ranks[None, :], mask=row_mask[:, None], other=0.0)
    return h


@triton.jit
def _add_delta(
    target,  # [BLOCK_M, 1]: where the slice's columns of each row start
    acc,
    n,
    row_mask,
    arena,
    offset_g,
    bias,
    COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """One tile of the result into y, or the delta to its place."""
    element: tl.constexpr = target.dtype.element_ty
    n_mask = n < SIZE
    mask = row_mask[:, None] & n_mask[None, :]
    target += n[None, :]
    if BESIDE:
        tl.store(target, acc.to(element), mask=mask)
    else:
        value = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        if offset_g != NO_GAIN:
            gain = tl.load(arena + offset_g * UNIT + n, mask=n_mask, other=1.0).to(tl.float32)
            if HAS_BIAS:
                shift = tl.load(bias + COLUMN + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
                value = gain[None, :] * (value - shift + acc) + shift
            else:
                value = gain[None, :] * (value + acc)
        else:
            value += acc
        tl.store(target, value.to(element), mask=mask)
