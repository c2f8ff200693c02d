"""A mixture's experts on CUDA: the base's products, and LoRA beside them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loramux.ops.expert_kernels import gate_runs_kernel, product_kernel
from loramux.ops.expert_pair_kernels import combine_kernel, gate_kernel
from loramux.ops.expert_routing import Choice, Routed, RoutedSlots, route, routing_kernels
from loramux.ops.expert_tiles import (
    BLOCK_RANKS,
    COMBINE_COLUMNS,
    GATE_COLUMNS,
    Mixture,
    ProductTiles,
    added_by_pair,
    combine_warps,
    expert_lora_tiles,
    product_tiles,
    run_rows,
)
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

_PLAIN_ROWS, _PLAIN_COLUMNS = 16, 128
"""Of a program of the gate where no adapter takes part."""
_LONG_ROW = 1 << 20
"""Features that are split as much as any."""
_COMBINE_PLAIN = 1024
"""Columns of a program of the sum where no adapter takes part."""

# Launch options are no parameters of the kernels, so a type checker cannot know them.
_product: Any = product_kernel
_gate: Any = gate_kernel
_gate_runs: Any = gate_runs_kernel
_combine: Any = combine_kernel


@dataclass(frozen=True)
class _Delta:
    """A x of some projections of the pairs' experts."""

    planes: Tensor
    pieces: Pieces
    table: Tensor
    tiles: Tiles
    slots: RoutedSlots


class TritonExperts:
    """Computes all experts of a layer, LoRA included, in a fixed number of launches.

    The host reads nothing but shapes, so a captured step serves whatever the router chooses and any
    adapters of the rank bucket. What one launch leaves for the next is allocated as it goes: under
    capture that is memory of the graph's own.
    """

    def __init__(self, step: StepLaunches) -> None:
        self._step = step
        self.number = register_experts(self)

    def kernels_of(
        self, num_tokens: int, mixture: Mixture, dtype: torch.dtype, *, rank_bucket: int, few: bool
    ) -> Hashable:
        """The same for sizes that are computed by the same kernels; for more tokens it never comes
        back to what it was for fewer."""
        num_pairs, num_experts = num_tokens * mixture.top_k, mixture.num_experts
        rows = run_rows(num_pairs, num_experts, few=few)
        return (
            product_tiles(num_pairs, num_experts, dtype.itemsize, self._step.shared_bytes),
            rows,
            expert_lora_tiles(_LONG_ROW, num_pairs, rank_bucket, rows),
            added_by_pair(num_pairs, num_experts, few=few),
            combine_warps(num_pairs),
            routing_kernels(num_pairs),
        )

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
        token_count: Tensor,
        activation: str,
        *,
        lora: bool,
    ) -> Tensor:
        """x ``[T, hidden]``, index (int64) and weights ``[T, k]`` -> ``[T, hidden]``.

        gate_up ``[experts, 2 * intermediate, hidden]``, down ``[experts, hidden, intermediate]``;
        table ``[3 * experts, slots + 1, 4]``: the slot tables' rows of gate, up and down of expert
        0, then of expert 1, …; token_slot ``[T or more]`` and token_count ``[1]``, both int32: rows
        from there on are padding and become 0. ``lora``: whether any adapter takes part in the
        step.
        """
        assert gate_up.is_contiguous(), "experts stand one after another"
        assert down.is_contiguous(), "experts stand one after another"
        num_tokens, top_k = index.shape
        num_pairs, (num_experts, hidden, size) = num_tokens * top_k, down.shape
        tiles = product_tiles(num_pairs, num_experts, x.element_size(), self._step.shared_bytes)
        columns = table.shape[1] if lora else None
        choice = Choice(index, token_slot, token_count)
        routed = route(self._step, choice, num_experts, tiles.block_rows, columns)
        slots, by_pair = routed.slots, added_by_pair(num_pairs, num_experts, few=self._step.few)

        into = slots and self._shrink(x, arena, table[:2], slots, slots.tokens)
        both = x.new_empty(num_pairs, 2 * size)
        self._product(x, gate_up, both, routed, choice, tiles, of_tokens=True)
        if into:
            self._step.join()
        inner = x.new_empty(num_pairs, size)
        if into and not by_pair:
            self._apply_gate_by_runs(both, inner, arena, into, activation)
        else:
            self._apply_gate(both, inner, arena, into, choice, activation)

        out = slots and self._shrink(inner, arena, table[2:3], slots, slots.order)
        y = x.new_empty(num_pairs, hidden)
        self._product(inner, down, y, routed, choice, tiles, of_tokens=False)
        if out:
            self._step.join()
        if out and not by_pair:
            launch_expand(
                self._step.run, y, out.planes, arena, out.table, [hidden], None, out.pieces,
                self._step.rank_bucket, out.tiles, beside=False,
            )  # fmt: skip
            out = None
        result = x.new_empty(num_tokens, hidden)
        self._combine(y, weights, result, arena, out, choice)
        return result

    def _product(
        self, x: Tensor, weight: Tensor, y: Tensor, routed: Routed, choice: Choice,
        tiles: ProductTiles, *, of_tokens: bool,
    ) -> None:  # fmt: skip
        """``of_tokens``: x has a row for each token, else for each pair."""
        pieces, top_k = routed.experts, choice.index.shape[1]
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
            choice.token_count,
            x.stride(0),
            N=y.shape[1],
            K=x.shape[1],
            TOP_K=top_k,
            PAIRS_PER_ROW=top_k if of_tokens else 1,
            ALONE=routed.alone,
            BLOCK_M=pieces.block_rows,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            DOT=dot_type(x.dtype),
            PRECISION="ieee",
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _shrink(
        self, x: Tensor, arena: Tensor, table: Tensor, slots: RoutedSlots, rows: Tensor
    ) -> _Delta:
        """Start A x, aside; ``rows``: those of x in sorted order."""
        ranks = self._step.rank_bucket
        tiles = expert_lora_tiles(x.shape[1], len(slots.order), ranks, slots.runs.block_rows)
        pieces = Pieces(slots.runs, rows)
        elements = plane_elements(tiles, len(table), pieces, ranks)
        planes = x.new_empty(elements, dtype=torch.float32)
        with self._step.aside():
            launch_shrink(self._step.run, x, planes, arena, table, pieces, ranks, tiles)
        return _Delta(planes, pieces, table, tiles, slots)

    def _apply_gate(
        self, both: Tensor, inner: Tensor, arena: Tensor, delta: _Delta | None, choice: Choice,
        activation: str,
    ) -> None:  # fmt: skip
        num_pairs, size = inner.shape
        block_rows, block_n = (1, GATE_COLUMNS) if delta else (_PLAIN_ROWS, _PLAIN_COLUMNS)
        arguments, constants = self._by_pair(delta, both, arena, choice)
        self._step.run(
            _gate,
            (triton.cdiv(num_pairs, block_rows), triton.cdiv(size, block_n)),
            both,
            inner,
            *arguments,
            delta.table.stride(0) if delta else 0,
            SIZE=size,
            ACTIVATION=activation,
            BLOCK_M=block_rows,
            BLOCK_N=block_n,
            **constants,
            num_warps=4,
            num_stages=1,
        )

    def _apply_gate_by_runs(
        self, both: Tensor, inner: Tensor, arena: Tensor, delta: _Delta, activation: str
    ) -> None:
        runs, size = delta.slots.runs, inner.shape[1]
        self._step.run(
            _gate_runs,
            (runs.grid, triton.cdiv(size, _PLAIN_COLUMNS)),
            both,
            inner,
            delta.planes,
            arena,
            delta.table,
            delta.slots.order,
            runs.slot,
            runs.start,
            runs.rows,
            delta.table.stride(0),
            delta.pieces.plane_rows,
            self._step.rank_bucket,
            SIZE=size,
            ACTIVATION=activation,
            UNIT=unit_of(arena),
            SPLIT_K=delta.tiles.split_k,
            BLOCK_M=runs.block_rows,
            BLOCK_N=_PLAIN_COLUMNS,
            BLOCK_R=delta.tiles.expand_ranks,
            DOT=dot_type(arena.dtype),
            PRECISION="ieee",
            num_warps=4,
            num_stages=1,
        )

    def _combine(
        self, y: Tensor, weights: Tensor, result: Tensor, arena: Tensor, delta: _Delta | None,
        choice: Choice,
    ) -> None:  # fmt: skip
        num_tokens, hidden = result.shape
        block_n, warps = _COMBINE_PLAIN, 4
        if delta:
            block_n, warps = COMBINE_COLUMNS, combine_warps(choice.index.numel())
        arguments, constants = self._by_pair(delta, y, arena, choice)
        self._step.run(
            _combine,
            (num_tokens, triton.cdiv(hidden, block_n)),
            y,
            weights.contiguous(),
            result,
            *arguments,
            SIZE=hidden,
            BLOCK_N=block_n,
            **constants,
            num_warps=warps,
            num_stages=1,
        )

    def _by_pair(
        self, delta: _Delta | None, nothing: Tensor, arena: Tensor, choice: Choice
    ) -> tuple[tuple[Tensor | int, ...], dict[str, int]]:
        """Arguments and constants of the kernels that add deltas pair by pair, or none; ``nothing``
        stands for what is not read then."""
        ranks, top_k = self._step.rank_bucket, choice.index.shape[1]
        constants = {"TOP_K": top_k, "UNIT": unit_of(arena), "BLOCK_R": BLOCK_RANKS}
        if delta is None:
            arguments = nothing, arena, nothing, nothing, choice.token_count, 0, 0, ranks
            return arguments, constants | {"LORA": False, "SPLIT_K": 1, "ONE_BLOCK": True}
        arguments = (
            delta.planes, arena, delta.table, delta.slots.by_pair, choice.token_count,
            delta.slots.by_pair.stride(0), delta.pieces.plane_rows, ranks,
        )  # fmt: skip
        changing = {
            "LORA": True, "SPLIT_K": delta.tiles.split_k, "ONE_BLOCK": ranks <= BLOCK_RANKS,
        }  # fmt: skip
        return arguments, constants | changing
