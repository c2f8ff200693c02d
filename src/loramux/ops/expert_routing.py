"""Who goes where in a mixture's layer: pairs of token and expert, sorted and cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from loramux.ops.expert_routing_kernels import cut_kernel, rank_kernel, sort_kernel, split_kernel
from loramux.ops.expert_tiles import ALONE_PAIRS, num_pieces, run_rows, stand_alone
from loramux.ops.lora_launches import StepLaunches

_SORTED_AT_ONCE = 128
"""Pairs that one program sorts and cuts."""
_MAX_COUNTED = 8192
"""Pairs that are sorted by counting, which is work by their square."""
_RANK_BLOCK, _CHUNK = 32, 256
_SHORT_CUT, _LONG_CUT = 1024, 4096
"""Pairs at a time, of which the long ones are for as many warps as there can be."""

# Launch options are no parameters of the kernels, so a type checker cannot know them.
_rank: Any = rank_kernel
_sort: Any = sort_kernel
_cut: Any = cut_kernel
_split: Any = split_kernel


@dataclass
class Runs:
    """``ops.interface.DeviceSegments`` for pairs; ``slot`` says which run of expert, or of expert
    and slot: the former's number, or the record of its gate."""

    slot: Tensor
    start: Tensor
    rows: Tensor
    block_rows: int
    grid: int

    @classmethod
    def of(cls, pieces: Tensor, block_rows: int, grid: int) -> Runs:
        """pieces ``[3, grid]``: which, start and rows."""
        return cls(pieces[0], pieces[1], pieces[2], block_rows, grid)


@dataclass(frozen=True)
class Choice:
    """What the router has chosen for a step, and which rows are tokens.

    index ``[T, k]`` int64: experts; token_slot ``[most tokens]`` int32; token_count ``[1]`` int32:
    rows from there on are padding, and take no part.
    """

    index: Tensor
    token_slot: Tensor
    token_count: Tensor


@dataclass(frozen=True)
class Routed:
    """Who goes where in one layer of a step."""

    order: Tensor
    """Pairs in sorted order."""
    experts: Runs
    alone: bool
    """Each pair is a piece of its own."""
    slots: RoutedSlots | None
    """None where only the base takes part."""


@dataclass(frozen=True)
class RoutedSlots:
    """The same for adapters. It is found beside what is launched next, so it is there for what runs
    aside, and after ``StepLaunches.join``."""

    order: Tensor
    tokens: Tensor
    """Of the pairs in sorted order."""
    runs: Runs
    """Of expert and slot."""
    by_pair: Tensor
    """``[2, pairs]``: a pair's row where each piece of runs has room for all that it may have, and
    its expert's record, as ``expert_routing_kernels`` counts them."""


def routing_kernels(num_pairs: int) -> tuple[bool, ...]:
    """The same for numbers of pairs that are sorted and cut by the same kernels."""
    most = _SORTED_AT_ONCE, _SHORT_CUT, _MAX_COUNTED
    return (stand_alone(num_pairs), *(num_pairs <= pairs for pairs in most))


def route(
    step: StepLaunches, choice: Choice, num_experts: int, expert_rows: int, columns: int | None
) -> Routed:
    """Sort the pairs and cut them into pieces of at most ``expert_rows`` of one expert, and of one
    expert and slot. ``columns``: of the slot tables; None where only the base takes part."""
    index = choice.index.contiguous()
    choice, num_pairs = replace(choice, index=index), index.numel()
    rows = run_rows(num_pairs, num_experts, few=step.few)
    if stand_alone(num_pairs):
        # What is not read stands for what is.
        order = choice.token_slot
        experts = Runs(index, order, order, expert_rows, num_pairs)
        slots = None if columns is None else _split_pairs(step, choice, columns, rows)
        return Routed(order, experts, True, slots)
    order, keys, experts = _sort_pairs(step, choice, num_experts, expert_rows, columns)
    slots = None
    if columns is not None:
        slots = _cut_by_slot(step, choice, order, keys, num_experts, columns, rows)
    return Routed(order, experts, False, slots)


def _split_pairs(step: StepLaunches, choice: Choice, columns: int, rows: int) -> RoutedSlots:
    num_pairs = choice.index.numel()
    made = _rows(choice, 7, num_pairs)
    order, tokens, pieces, by_pair = made[0], made[1], made[2:5], made[5:]
    with step.aside():
        step.run(
            _split,
            (1,),
            choice.index,
            choice.token_slot,
            choice.token_count,
            order,
            tokens,
            pieces,
            by_pair,
            num_pairs,
            made.stride(0),
            columns,
            rows,
            TOP_K=choice.index.shape[1],
            BLOCK=ALONE_PAIRS,
            num_warps=1,
            num_stages=1,
        )
    return RoutedSlots(order, tokens, Runs.of(pieces, rows, num_pairs), by_pair)


def _sort_pairs(
    step: StepLaunches, choice: Choice, num_experts: int, rows: int, columns: int | None
) -> tuple[Tensor, Tensor, Runs]:
    """-> order, keys, and pieces of experts."""
    index = choice.index
    num_pairs = index.numel()
    grid = num_pieces(num_pairs, num_experts, rows)
    order, keys, starts = _rows(choice, 3, num_pairs)
    pieces = _rows(choice, 3, grid)
    experts = Runs.of(pieces, rows, grid)
    routed = index, choice.token_slot, choice.token_count
    constants = {"TOP_K": index.shape[1], "HAS_SLOTS": columns is not None}
    if num_pairs <= _SORTED_AT_ONCE:
        step.run(
            _sort, (1,), *routed, order, keys, starts, pieces, columns or 1, pieces.stride(0), rows,
            **constants, BLOCK=_SORTED_AT_ONCE, num_warps=8, num_stages=1,
        )  # fmt: skip
        return order, keys, experts
    if num_pairs <= _MAX_COUNTED:
        step.run(
            _rank, (triton.cdiv(num_pairs, _RANK_BLOCK),), *routed, order, keys, columns or 1,
            **constants, BLOCK=_RANK_BLOCK, CHUNK=_CHUNK, num_warps=4, num_stages=1,
        )  # fmt: skip
    else:
        order, keys = sort_pairs(choice, num_experts, columns)
    _launch_cut(step, choice, order, keys, starts, pieces, columns, rows)
    return order, keys, experts


def _cut_by_slot(
    step: StepLaunches, choice: Choice, order: Tensor, keys: Tensor, num_experts: int,
    columns: int, rows: int,
) -> RoutedSlots:  # fmt: skip
    num_pairs = len(order)
    grid = num_pieces(num_pairs, num_experts * columns, rows)
    made = _rows(choice, 4, num_pairs)
    tokens, starts, by_pair = made[0], made[1], made[2:]
    pieces = _rows(choice, 3, grid)
    with step.aside():
        _launch_cut(step, choice, order, keys, starts, pieces, columns, rows, (tokens, by_pair))
    return RoutedSlots(order, tokens, Runs.of(pieces, rows, grid), by_pair)


def _launch_cut(
    step: StepLaunches, choice: Choice, order: Tensor, keys: Tensor, starts: Tensor, pieces: Tensor,
    columns: int | None, rows: int, for_slots: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """By expert, or by expert and slot with ``for_slots``: tokens and by_pair, to be filled."""
    tokens, by_pair = for_slots or (order, order)
    long = len(keys) > _SHORT_CUT
    step.run(
        _cut,
        (1,),
        keys,
        choice.token_count,
        starts,
        pieces,
        order,
        tokens,
        by_pair,
        by_pair.stride(0),
        pieces.stride(0),
        rows,
        columns or 1,
        TOP_K=choice.index.shape[1],
        BY_SLOT=for_slots is not None,
        CHUNK=_LONG_CUT if long else _SHORT_CUT,
        num_warps=16 if long else 8,
        num_stages=1,
    )


def _rows(choice: Choice, count: int, size: int) -> Tensor:
    """Rows of int32 that all begin aligned: how a kernel is compiled hangs on that."""
    return choice.token_slot.new_empty(count, -(-size // 4) * 4)[:, :size]


def sort_pairs(choice: Choice, num_experts: int, columns: int | None) -> tuple[Tensor, Tensor]:
    """What ``rank_kernel`` finds, by torch's sort, for any number of pairs; those of padding stand
    last. -> order and keys ``[pairs]`` int32."""
    num_tokens = len(choice.index)
    keys, padding_key = choice.index, num_experts
    if columns is not None:
        keys = keys * columns + choice.token_slot[:num_tokens, None]
        padding_key *= columns
    rows = torch.arange(num_tokens, device=keys.device)
    padding = (rows >= choice.token_count)[:, None]
    keys, order = keys.masked_fill(padding, padding_key).int().view(-1).sort(stable=True)
    return order.int(), keys
