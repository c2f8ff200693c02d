"""Draws of tokens as one Triton kernel, one program a row.

What a draw means is said by the torch code of ``worker.filters`` and ``worker.drawing``: scores
become gaps to the best one, gaps become weights that are whole numbers, and the token is where the
running sum of the weights passes a share of their total.

A gap is a float that is not negative, so its bits, read as an integer, are its **key**: keys are
ordered as gaps are. Both top_k and top_p look for a last key: the smallest one up to which there
are k entries, or up to which the entries hold the share p of the whole weight. Most rows keep few
tokens, so a program first notes the entries up to a key that is likely to be enough (with the key
of the k-th best of BLOCK groups' best entries there are k at least), and searches among those.
Where they are too many, or not enough, each pass over the row leaves a quarter of the range of
keys, until its entries can be noted. The outcome is exact for every row; the time alone hangs on
the scores.

Sums are of whole numbers, nothing is added atomically, and a program reads no row but its own.
"""

from __future__ import annotations

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
import triton
import triton.language as tl

BLOCK = 4096
"""Columns that a program works on at once."""
ROOM = 4096
"""Entries of a row that can be noted."""
NUM_WARPS = 16

_MAX_KEY = tl.constexpr(0x7F800000)
"""Key of an infinite gap."""
_NO_KEY = tl.constexpr(0x7FFFFFFF)
"""Of what is no entry: above all keys."""
_FIELDS = tl.constexpr(6)
"""Numbers of a draw: row, rate, top_k, top_p, least weight, uniform."""


@triton.jit
def draw_kernel(
    scores,  # [rows, VOCAB]
    best,  # [rows] float32: the largest score
    draws,  # [draws, FIELDS] float64
    noted_keys,  # [draws, ROOM] int32
    noted_ids,  # [draws, ROOM] int32
    token_ids,  # [rows] int64
    stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,  # a power of two, at least VOCAB / BLOCK
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """token_ids[row of the draw] = the token that the draw comes to. Grid (draws,)."""
    number = tl.program_id(0).to(tl.int64)
    draw = draws + number * _FIELDS
    row = tl.load(draw).to(tl.int64)
    rate = tl.load(draw + 1)
    top_k = tl.load(draw + 2).to(tl.int64)
    top_p = tl.load(draw + 3)
    least = tl.load(draw + 4)
    uniform = tl.load(draw + 5)
    top = tl.load(best + row)
    if not (tl.abs(top) < float("inf")):
        return  # the row is not sound: any token will do, and the best one stands there
    row_scores = scores + row * stride
    keys_at = noted_keys + number * ROOM
    ids_at = noted_ids + number * ROOM

    # Noted is what has a key above ``low``, if the count says that there was room.
    low = tl.full([], -1, tl.int32)
    count = tl.full([], ROOM + 1, tl.int32)
    last = tl.full([], _MAX_KEY, tl.int32)
    nothing = tl.full([], 0, tl.int64)
    if top_k > 0:
        last = _likely_key(row_scores, top, top_k, VOCAB, BLOCK)
        count = _note(row_scores, top, low, last, keys_at, ids_at, VOCAB, BLOCK, ROOM)
        last, low, count = _last_key(
            row_scores, top, rate, low, last, nothing, top_k, count, keys_at, ids_at,
            False, VOCAB, UNIT, BLOCK, ROOM,
        )  # fmt: skip
    if top_p < 1.0:
        below = nothing
        if (low < 0) & (count <= ROOM):
            whole = _noted_weight(keys_at, ids_at, count, rate, last, VOCAB, UNIT, ROOM)
            target = tl.ceil(whole.to(tl.float64) * top_p).to(tl.int64)
        else:
            sums = _chunk_sums(row_scores, top, rate, last, 0.0, VOCAB, CHUNKS, UNIT, BLOCK)
            whole = tl.sum(sums)
            target = tl.ceil(whole.to(tl.float64) * top_p).to(tl.int64)
            # Beyond this gap the best's weight, at most 2**62, has come down to nothing.
            last = tl.minimum(last, (-43.0 / rate).to(tl.float32).to(tl.int32, bitcast=True))
            low = tl.full([], -1, tl.int32)
            likely = tl.minimum(_likely_key(row_scores, top, ROOM // 2, VOCAB, BLOCK), last)
            count = _note(row_scores, top, low, likely, keys_at, ids_at, VOCAB, BLOCK, ROOM)
            if count <= ROOM:
                held = _noted_weight(keys_at, ids_at, count, rate, likely, VOCAB, UNIT, ROOM)
                if held >= target:
                    last = likely
                else:
                    low = likely
                    below = held
                    count = _note(row_scores, top, low, last, keys_at, ids_at, VOCAB, BLOCK, ROOM)
        last, low, count = _last_key(
            row_scores, top, rate, low, last, below, target, count, keys_at, ids_at,
            True, VOCAB, UNIT, BLOCK, ROOM,
        )  # fmt: skip

    if (low < 0) & (count <= ROOM):
        token = _of_noted(keys_at, ids_at, count, rate, last, least, uniform, VOCAB, UNIT, ROOM)
    else:
        token = _of_row(row_scores, top, rate, last, least, uniform, VOCAB, CHUNKS, UNIT, BLOCK)
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _keys(row_scores, top, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Keys of BLOCK columns, and _NO_KEY for those that the row has not."""
    columns = start + tl.arange(0, BLOCK)
    there = columns < VOCAB
    score = tl.load(row_scores + columns, mask=there, other=0.0).to(tl.float32)
    gap = tl.abs(top - score)  # which takes the sign of -0.0 away, and no other has one
    return tl.where(there, gap.to(tl.int32, bitcast=True), _NO_KEY)


@triton.jit
def _weights(keys, rate, last, least, UNIT: tl.constexpr):
    """Weights of entries: 0 for those with a key above ``last``, or lighter than ``least``."""
    gaps = tl.where(keys <= last, keys.to(tl.float32, bitcast=True), float("inf"))
    exact = tl.exp(gaps.to(tl.float64) * rate) * UNIT
    return tl.where(exact >= least, exact, 0.0).to(tl.int64)


@triton.jit
def _first(keys, values, target, low, high):
    """The smallest key up to which the values come to ``target``, which is in (low, high].

    Up to ``low`` they do not, up to ``high`` they do.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(keys <= middle, values, 0)) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle)
    return high


@triton.jit
def _likely_key(row_scores, top, wanted, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """A key that at least ``wanted`` entries have or are below, and hardly more where few are.

    Each of BLOCK groups of columns gives its best entry, and the key is of the best but ``wanted``
    of these; the largest key if there are fewer groups.
    """
    least = tl.full((BLOCK,), _NO_KEY, tl.int32)
    # Four blocks at a time, so that their loads are under way together.
    for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):
        least = tl.minimum(least, _keys(row_scores, top, start, VOCAB, BLOCK))
    one = tl.full((BLOCK,), 1, tl.int32)
    low = tl.full([], -1, tl.int32)
    return _first(least, one, wanted, low, tl.full([], _MAX_KEY, tl.int32))


@triton.jit
def _note(
    row_scores,
    top,
    low,
    high,
    keys_at,
    ids_at,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Note the entries with a key in (low, high], in their order; returns how many they are.

    Any number above ROOM says that there was no room for them.
    """
    tl.debug_barrier()  # what was noted before has been read
    count = tl.full([], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        if count <= ROOM:
            keys = _keys(row_scores, top, start, VOCAB, BLOCK)
            inside = ((keys > low) & (keys <= high)).to(tl.int32)
            found = tl.sum(inside)
            if found > 0:
                place = count + tl.cumsum(inside) - inside
                fits = (inside > 0) & (place < ROOM)
                tl.store(keys_at + place, keys, mask=fits)
                tl.store(ids_at + place, start + tl.arange(0, BLOCK), mask=fits)
            count += found
    tl.debug_barrier()  # all threads of the program see it
    return count


@triton.jit
def _noted(keys_at, ids_at, count, VOCAB: tl.constexpr, ROOM: tl.constexpr):
    """Keys and ids of what was noted, as many as there was room for."""
    i = tl.arange(0, ROOM)
    keys = tl.load(keys_at + i, mask=i < count, other=_NO_KEY)
    return keys, tl.load(ids_at + i, mask=i < count, other=VOCAB)


@triton.jit
def _noted_weight(
    keys_at, ids_at, count, rate, last, VOCAB: tl.constexpr, UNIT: tl.constexpr, ROOM: tl.constexpr
):
    """What the noted entries up to ``last`` weigh."""
    keys, _ = _noted(keys_at, ids_at, count, VOCAB, ROOM)
    return tl.sum(_weights(keys, rate, last, 0.0, UNIT))


@triton.jit
def _last_key(
    row_scores,
    top,
    rate,
    low,
    high,
    below,
    target,
    count,
    keys_at,
    ids_at,
    BY_WEIGHT: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The smallest key in (low, high] up to which the row's entries come to ``target``.

    By number, or by weight. ``below``: what they come to up to ``low``; ``count``: of the entries
    with a key in (low, high], as ``_note`` has it. Returns as well above which key the entries that
    are noted now begin, and their count.
    """
    while (count > ROOM) & (high - low > 1):
        low, high, below = _narrowed(
            row_scores, top, rate, low, high, below, target, BY_WEIGHT, VOCAB, UNIT, BLOCK
        )
        count = _note(row_scores, top, low, high, keys_at, ids_at, VOCAB, BLOCK, ROOM)
    # With one key left there may still be no room for its entries, and nothing to search for.
    keys, _ = _noted(keys_at, ids_at, count, VOCAB, ROOM)
    if BY_WEIGHT:
        last = _first(keys, _weights(keys, rate, high, 0.0, UNIT), target - below, low, high)
    else:
        one = tl.full((ROOM,), 1, tl.int32)
        last = _first(keys, one, target - below, low, high)
    return last, low, count


@triton.jit
def _narrowed(
    row_scores,
    top,
    rate,
    low,
    high,
    below,
    target,
    BY_WEIGHT: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The quarter of the range (low, high] where ``target`` is reached, by one pass over the row.

    Returns its bounds, and what the entries up to the lower one come to.
    """
    step = tl.maximum((high - low) // 4, 1)
    key1 = low + step
    key2 = tl.minimum(key1 + step, high)
    key3 = tl.minimum(key2 + step, high)
    part1 = tl.zeros((BLOCK,), tl.int64)
    part2 = tl.zeros((BLOCK,), tl.int64)
    part3 = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        keys = _keys(row_scores, top, start, VOCAB, BLOCK)
        if BY_WEIGHT:
            values = _weights(keys, rate, high, 0.0, UNIT)
        else:
            values = tl.full((BLOCK,), 1, tl.int64)
        part1 += tl.where(keys <= key1, values, 0)
        part2 += tl.where(keys <= key2, values, 0)
        part3 += tl.where(keys <= key3, values, 0)
    sum1, sum2, sum3 = tl.sum(part1), tl.sum(part2), tl.sum(part3)
    if sum1 >= target:
        high = key1
    elif sum2 >= target:
        low = key1
        high = key2
        below = sum1
    elif sum3 >= target:
        low = key2
        high = key3
        below = sum2
    else:
        low = key3
        below = sum3
    return low, high, below


@triton.jit
def _of_noted(
    keys_at,
    ids_at,
    count,
    rate,
    last,
    least,
    uniform,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The token drawn, when all entries up to ``last`` are noted."""
    keys, ids = _noted(keys_at, ids_at, count, VOCAB, ROOM)
    weights = _weights(keys, rate, last, least, UNIT)
    passed = (tl.sum(weights).to(tl.float64) * uniform).to(tl.int64)
    low = tl.full([], -1, tl.int32)
    return _first(ids, weights, passed + 1, low, tl.full([], VOCAB - 1, tl.int32))


@triton.jit
def _of_row(
    row_scores,
    top,
    rate,
    last,
    least,
    uniform,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token drawn, by a pass over the row."""
    sums = _chunk_sums(row_scores, top, rate, last, least, VOCAB, CHUNKS, UNIT, BLOCK)
    passed = (tl.sum(sums).to(tl.float64) * uniform).to(tl.int64)
    chunk = tl.sum((tl.cumsum(sums) <= passed).to(tl.int32))
    before = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, sums, 0))
    start = chunk * BLOCK
    keys = _keys(row_scores, top, start, VOCAB, BLOCK)
    weights = _weights(keys, rate, last, least, UNIT)
    end = tl.minimum(start + BLOCK, VOCAB) - 1
    ids = start + tl.arange(0, BLOCK)
    return _first(ids, weights, passed + 1 - before, start - 1, end)


@triton.jit
def _chunk_sums(
    row_scores,
    top,
    rate,
    last,
    least,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What each BLOCK columns of the row weigh."""
    chunks = tl.arange(0, CHUNKS)
    sums = tl.zeros((CHUNKS,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        keys = _keys(row_scores, top, start, VOCAB, BLOCK)
        weight = tl.sum(_weights(keys, rate, last, least, UNIT))
        sums = tl.where(chunks == start // BLOCK, weight, sums)
    return sums
