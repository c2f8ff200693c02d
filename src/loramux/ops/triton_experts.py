"""A mixture's experts on CUDA: the base's products, and LoRA beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loramux.ops.expert_kernels import (
    NUM_FIELDS,
    combine_kernel,
    cut_kernel,
    gate_kernel,
    product_kernel,
    rank_kernel,
)
from loramux.ops.expert_tiles import (
    ProductTiles,
    expert_lora_tiles,
    num_pieces,
    product_tiles,
    run_rows,
)
from loramux.ops.layout import EXPERT_PARTS
from loramux.ops.lora_launches import (
    Pieces,
    StepLaunches,
    dot_type,
    launch_expand,
    launch_shrink,
    plane_elements,
    unit_of,
)
from loramux.ops.opaque import register_experts
from loramux.ops.tiles import Tiles

_MAX_COUNTED = 8192
"""Pairs that are sorted by counting, in one launch; its work grows with their square."""
_RANK_BLOCK, _CHUNK = 32, 256
_CUT_CHUNK = 1024
_GATE_COLUMNS, _COMBINE_COLUMNS = 128, 1024
_PLAIN_ROWS = 16
"""Of a program of the gate where no adapter takes part."""

# Launch options are no parameters of the kernels, so a type checker cannot know them.
_rank: Any = rank_kernel
_cut: Any = cut_kernel
_product: Any = product_kernel
_gate: Any = gate_kernel
_combine: Any = combine_kernel


@dataclass
class _Segments:
    """``ops.interface.DeviceSegments`` for pairs; ``slot`` says which run of expert, or of expert
    and slot, as ``rank_kernel`` calls it."""

    slot: Tensor
    start: Tensor
    rows: Tensor
    block_rows: int
    grid: int


@dataclass(frozen=True)
class _Routed:
    """Who goes where in one layer of a step."""

    order: Tensor
    tokens: Tensor
    experts: _Segments
    runs: _Segments
    """Of expert and slot; without adapters there are none."""


@dataclass(frozen=True)
class _Delta:
    """A x of some projections of the pairs' experts."""

    planes: Tensor
    pieces: Pieces
    table: Tensor
    tiles: Tiles


class TritonExperts:
    """Computes all experts of a layer, LoRA included, in a fixed number of launches.

    The host reads nothing but shapes, so a captured step serves whatever the router chooses and any
    adapters of the rank bucket. What one launch leaves for the next is allocated as it goes: under
    capture that is memory of the graph's own.
    """

    def __init__(self, step: StepLaunches) -> None:
        self._step = step
        self.number = register_experts(self)

    def run_experts(
        self,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        arena: Tensor,
        table: Tensor,
        token_slot: Tensor,
        activation: str,
        *,
        lora: bool,
    ) -> Tensor:
        """x ``[T, hidden]``, index (int64) and weights ``[T, k]`` -> ``[T, hidden]``.

        gate_up ``[experts, 2 * intermediate, hidden]``, down ``[experts, hidden, intermediate]``;
        table ``[3 * experts, slots + 1, 4]``: the slot tables' rows of gate, up and down of expert
        0, then of expert 1, … ``lora``: whether any adapter takes part in the step.
        """
        assert gate_up.is_contiguous(), "experts stand one after another"
        assert down.is_contiguous(), "experts stand one after another"
        num_tokens, top_k = index.shape
        num_pairs, (num_experts, hidden, size) = num_tokens * top_k, down.shape
        tiles = product_tiles(num_pairs, num_experts, x.element_size())
        columns = table.shape[1] if lora else 1
        routed = self._route(index, token_slot, num_experts, columns, tiles.block_rows)

        into = self._shrink(x, arena, table[:2], routed, routed.tokens) if lora else None
        both = x.new_empty(num_pairs, 2 * size)
        self._product(x, gate_up, both, routed, top_k, tiles)
        if lora:
            self._step.join()
        inner = x.new_empty(num_pairs, size)
        self._apply_gate(both, inner, arena, into, routed, activation)

        out = self._shrink(inner, arena, table[2:3], routed, routed.order) if lora else None
        y = x.new_empty(num_pairs, hidden)
        self._product(inner, down, y, routed, 1, tiles)
        if out is not None:
            self._step.join()
            launch_expand(
                self._step.run, y, out.planes, arena, out.table, [hidden], None, out.pieces,
                self._step.rank_bucket, out.tiles, beside=False,
            )  # fmt: skip
        result = x.new_empty(num_tokens, hidden)
        self._step.run(
            _combine,
            (num_tokens, triton.cdiv(hidden, _COMBINE_COLUMNS)),
            y,
            weights.contiguous(),
            result,
            SIZE=hidden,
            TOP_K=top_k,
            BLOCK_N=_COMBINE_COLUMNS,
            num_warps=4,
            num_stages=1,
        )
        return result

    def _route(
        self, index: Tensor, token_slot: Tensor, num_experts: int, columns: int, expert_rows: int
    ) -> _Routed:
        """Sort the pairs by expert and slot, and cut the runs. One column: all are the base's."""
        num_pairs, few, lora = index.numel(), self._step.few, columns > 1
        if num_pairs <= _MAX_COUNTED:
            order, tokens = index.new_empty(2, num_pairs, dtype=torch.int32)
            found = order.new_empty(NUM_FIELDS, num_pairs)
            self._step.run(
                _rank,
                (triton.cdiv(num_pairs, _RANK_BLOCK),),
                index.contiguous(),
                token_slot,
                order,
                tokens,
                found,
                num_pairs,
                columns,
                TOP_K=index.shape[1],
                HAS_SLOTS=lora,
                BLOCK=_RANK_BLOCK,
                CHUNK=_CHUNK,
                num_warps=4,
                num_stages=1,
            )
        else:
            slots = token_slot[: len(index)] if lora else None
            order, tokens, found = sort_pairs(index, slots, columns)
        rows = expert_rows, run_rows(num_pairs, num_experts, few=few)
        grids = [
            num_pieces(num_pairs, num_runs, most)
            for num_runs, most in zip((num_experts, num_experts * columns), rows, strict=True)
        ]
        capacity = max(grids)
        pieces = order.new_empty(2, 3, capacity)
        self._step.run(
            _cut,
            (2 if lora else 1,),
            found,
            pieces,
            num_pairs,
            capacity,
            *rows,
            CHUNK=_CUT_CHUNK,
            num_warps=4,
            num_stages=1,
        )
        experts, runs = (
            _Segments(part[0], part[1], part[2], block_rows, grid)
            for part, block_rows, grid in zip(pieces.unbind(), rows, grids, strict=True)
        )
        return _Routed(order, tokens, experts, runs)

    def _product(
        self, x: Tensor, weight: Tensor, y: Tensor, routed: _Routed, pairs_per_row: int,
        tiles: ProductTiles,
    ) -> None:  # fmt: skip
        pieces = routed.experts
        self._step.run(
            _product,
            (pieces.grid, triton.cdiv(y.shape[1], tiles.block_n)),
            x,
            weight,
            y,
            routed.order,
            pieces.slot,
            pieces.start,
            pieces.rows,
            x.stride(0),
            N=y.shape[1],
            K=x.shape[1],
            PAIRS_PER_ROW=pairs_per_row,
            BLOCK_M=pieces.block_rows,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            DOT=dot_type(x.dtype),
            PRECISION="ieee",
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _shrink(
        self, x: Tensor, arena: Tensor, table: Tensor, routed: _Routed, rows: Tensor
    ) -> _Delta:
        """Start A x, aside; ``rows``: those of x in sorted order."""
        ranks = self._step.rank_bucket
        tiles = expert_lora_tiles(x.shape[1], len(routed.order), ranks, routed.runs.block_rows)
        pieces = Pieces(routed.runs, rows)
        elements = plane_elements(tiles, len(table), pieces, ranks)
        planes = x.new_empty(elements, dtype=torch.float32)
        with self._step.aside():
            launch_shrink(self._step.run, x, planes, arena, table, pieces, ranks, tiles)
        return _Delta(planes, pieces, table, tiles)

    def _apply_gate(
        self,
        both: Tensor,
        inner: Tensor,
        arena: Tensor,
        delta: _Delta | None,
        routed: _Routed,
        activation: str,
    ) -> None:
        num_pairs, size = inner.shape
        runs, ranks = routed.runs, self._step.rank_bucket
        block_rows = _PLAIN_ROWS if delta is None else runs.block_rows
        grid = triton.cdiv(num_pairs, block_rows) if delta is None else runs.grid
        self._step.run(
            _gate,
            (grid, triton.cdiv(size, _GATE_COLUMNS)),
            both,
            inner,
            both if delta is None else delta.planes,
            arena,
            both if delta is None else delta.table,
            routed.order,
            runs.slot,
            runs.start,
            runs.rows,
            num_pairs,
            0 if delta is None else delta.table.stride(0),
            0 if delta is None else delta.pieces.plane_rows,
            ranks,
            SIZE=size,
            ACTIVATION=activation,
            LORA=delta is not None,
            UNIT=unit_of(arena),
            SPLIT_K=1 if delta is None else delta.tiles.split_k,
            BLOCK_M=block_rows,
            BLOCK_N=_GATE_COLUMNS,
            BLOCK_R=16 if delta is None else delta.tiles.expand_ranks,
            DOT=dot_type(arena.dtype),
            PRECISION="ieee",
            num_warps=4,
            num_stages=1,
        )


def sort_pairs(
    index: Tensor, token_slot: Tensor | None, num_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``rank_kernel`` finds, by torch's sort, for any number of pairs.

    index ``[T, k]`` int64, token_slot ``[T]`` -> order and tokens ``[pairs]`` and the fields
    ``[6, pairs]``, all int32.
    """
    top_k = index.shape[1]
    slots = index.new_zeros(len(index)) if token_slot is None else token_slot.long()
    keys = (index * num_columns + slots[:, None]).reshape(-1)
    keys, order = keys.sort(stable=True)
    experts = keys // num_columns
    first = experts * num_columns
    places = torch.arange(len(keys), device=keys.device)
    bounds = torch.stack([first, first + num_columns, keys, keys + 1])
    expert_start, expert_end, run_start, run_end = torch.searchsorted(keys, bounds)
    found = torch.stack(
        [
            experts,
            places - expert_start,
            expert_end - places,
            first * EXPERT_PARTS + keys - first,
            places - run_start,
            run_end - places,
        ]
    )
    return order.int(), (order // top_k).int(), found.int()
