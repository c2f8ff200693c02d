"""Who goes where in a mixture's layer, found on the device because the router has just said it.

A pair is a token and one of the experts chosen for it; pair p is choice p % TOP_K of token
p // TOP_K. Its key is expert * columns + slot, where columns are those of the slot tables, or 1
where all are the base's. Sorted by key, pairs form runs of one expert, and within them runs of one
expert and slot; both are cut into pieces of as many rows as a program takes. Rows from
``token_count`` on are padding: their pairs take no part.

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

EXPERT_PARTS = tl.constexpr(layout.EXPERT_PARTS)


@triton.jit(do_not_specialize=["capacity", "rows"])
def sort_kernel(
    index,  # [T, TOP_K] int64: the experts that the router has chosen
    token_slot,  # [T]
    token_count,  # [1]: of the rows, those that are no padding
    order,  # [pairs] int32, out: pairs in sorted order
    keys,  # [pairs] int32, out: their keys, in that order
    starts,  # [pairs] int32: what one part of this kernel leaves for the next
    pieces,  # [3, capacity] int32, out: of experts: which one, start and rows
    num_columns,
    capacity,
    rows,
    TOP_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,  # no less than there are pairs
):
    """Sorts a hundred pairs or so and cuts them by expert. Grid (1)."""
    num_used = tl.load(token_count) * TOP_K
    _rank(index, token_slot, order, keys, 0, num_used, num_columns, TOP_K, HAS_SLOTS, BLOCK, BLOCK)
    tl.debug_barrier()
    _cut(
        keys, starts, pieces, order, order, order, num_used, capacity, rows, num_columns, False,
        BLOCK,
    )  # fmt: skip


@triton.jit
def rank_kernel(
    index,
    token_slot,
    token_count,
    order,  # out
    keys,  # out
    num_columns,
    TOP_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sorts up to some thousands of pairs. Grid (blocks of pairs)."""
    num_used = tl.load(token_count) * TOP_K
    _rank(
        index, token_slot, order, keys, tl.program_id(0) * BLOCK, num_used, num_columns, TOP_K,
        HAS_SLOTS, BLOCK, CHUNK,
    )  # fmt: skip


@triton.jit
def _rank(
    index,
    token_slot,
    order,
    keys,
    first,
    num_used,
    num_columns,
    TOP_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A pair's place is the number of pairs before it, which is counted."""
    pairs = first + tl.arange(0, BLOCK)
    mask = pairs < num_used
    key = _keys_of(index, token_slot, pairs, mask, num_columns, TOP_K, HAS_SLOTS)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_used, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other_mask = others < num_used
        other = _keys_of(index, token_slot, others, other_mask, num_columns, TOP_K, HAS_SLOTS)
        other = tl.where(other_mask, other, 0x7FFFFFFF)[None, :]
        before = (other < key[:, None]) | (
            (other == key[:, None]) & (others[None, :] < pairs[:, None])
        )
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(order + place, pairs, mask=mask)
    tl.store(keys + place, key, mask=mask)


@triton.jit
def _keys_of(
    index, token_slot, pairs, mask, num_columns, TOP_K: tl.constexpr, HAS_SLOTS: tl.constexpr
):
    key = tl.load(index + pairs, mask=mask, other=0).to(tl.int32) * num_columns
    if HAS_SLOTS:
        key += tl.load(token_slot + pairs // TOP_K, mask=mask, other=0)
    return key


@triton.jit(do_not_specialize=["most_pairs", "capacity", "rows"])
def cut_kernel(
    keys,
    token_count,
    starts,  # [pairs] int32: as above
    pieces,  # [3, capacity] int32, out: which run, start and rows
    order,
    tokens,  # [pairs] int32, out for runs of slots: the tokens of pairs in sorted order
    by_pair,  # [2, most_pairs] int32, out for runs of slots: see split_kernel
    most_pairs,
    capacity,
    rows,
    num_columns,
    TOP_K: tl.constexpr,
    BY_SLOT: tl.constexpr,  # runs of expert and slot, else of experts
    CHUNK: tl.constexpr,
):
    """Cuts runs into pieces of at most so many rows. Grid (1)."""
    num_used = tl.load(token_count) * TOP_K
    if BY_SLOT:
        for start in range(0, num_used, CHUNK):
            at = start + tl.arange(0, CHUNK)
            pair = tl.load(order + at, mask=at < num_used, other=0)
            tl.store(tokens + at, pair // TOP_K, mask=at < num_used)
    _cut(
        keys, starts, pieces, order, by_pair, by_pair + most_pairs, num_used, capacity, rows,
        num_columns, BY_SLOT, CHUNK,
    )  # fmt: skip


@triton.jit
def _cut(
    keys,
    starts,
    pieces,
    order,
    places,
    records,
    num_used,
    capacity,
    rows,
    num_columns,
    BY_SLOT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    num_runs = 0
    count = 0
    for first in range(0, num_used, CHUNK):
        at = first + tl.arange(0, CHUNK)
        mask = at < num_used
        key = tl.load(keys + at, mask=mask, other=0)
        last = tl.load(keys + at - 1, mask=mask & (at > 0), other=-1)
        expert = key // num_columns
        if BY_SLOT:
            run = expert * (num_columns * EXPERT_PARTS) + key - expert * num_columns
            new = mask & (key != last)
        else:
            run = expert
            new = mask & ((at == 0) | (expert != last // num_columns))
        which = num_runs + tl.cumsum(new.to(tl.int32), 0) - 1
        tl.store(starts + which, at, mask=new)
        num_runs += tl.sum(new.to(tl.int32), 0)
        tl.debug_barrier()
        into = at - tl.load(starts + which, mask=mask, other=0)
        begins = mask & (into % rows == 0)
        piece = count + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(pieces + piece, run, mask=begins)
        tl.store(pieces + capacity + piece, at, mask=begins)
        if BY_SLOT:
            pair = tl.load(order + at, mask=mask, other=0)
            tl.store(places + pair, piece * rows + into % rows, mask=mask)
            tl.store(records + pair, run, mask=mask)
        count += tl.sum(begins.to(tl.int32), 0)
    tl.debug_barrier()
    nothing = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, capacity, CHUNK):
        piece = first + tl.arange(0, CHUNK)
        mask = piece < capacity
        start = tl.load(pieces + capacity + piece, mask=piece < count, other=0)
        end = tl.load(pieces + capacity + piece + 1, mask=piece + 1 < count, other=0)
        end = tl.where(piece + 1 == count, num_used, end)
        tl.store(pieces + 2 * capacity + piece, end - start, mask=mask)
        # Kernels load what belongs to a piece before they know whether it has rows.
        unused = mask & (piece >= count)
        tl.store(pieces + piece, nothing, mask=unused)
        tl.store(pieces + capacity + piece, nothing, mask=unused)


@triton.jit(do_not_specialize=["num_pairs", "most_pairs", "num_columns", "run_rows"])
def split_kernel(
    index,
    token_slot,
    token_count,
    order,  # [pairs] int32, out
    tokens,  # [pairs] int32, out
    pieces,  # [3, most_pairs] int32, out: of runs of expert and slot
    by_pair,  # [2, most_pairs] int32, out: a pair's row where each piece has room for all that it
    # may have, and the record of its expert's gate, counted from that of expert 0 and slot 0
    num_pairs,
    most_pairs,
    num_columns,
    run_rows,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for a few pairs, each of which is a piece by itself: nothing is sorted. Grid (1)."""
    pairs = tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    expert = tl.load(index + pairs, mask=mask, other=0).to(tl.int32)
    run = expert * (num_columns * EXPERT_PARTS)
    run += tl.load(token_slot + pairs // TOP_K, mask=mask, other=0)
    used = pairs < tl.load(token_count) * TOP_K
    tl.store(order + pairs, pairs, mask=mask)
    tl.store(tokens + pairs, pairs // TOP_K, mask=mask)
    tl.store(pieces + pairs, run, mask=mask)
    tl.store(pieces + most_pairs + pairs, pairs, mask=mask)
    tl.store(pieces + 2 * most_pairs + pairs, used.to(tl.int32), mask=mask)
    tl.store(by_pair + pairs, pairs * run_rows, mask=mask)
    tl.store(by_pair + most_pairs + pairs, run, mask=mask)
