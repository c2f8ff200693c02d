"""Experts with LoRA, and routers with weights of an adapter's own."""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loramux.lora.layers import Form, LoraContext
from loramux.lora.wrapper import Wrapper
from loramux.ops.interface import Site, Slice
from loramux.ops.layout import EXPERT_PARTS
from loramux.ops.opaque import own_results, run_experts
from loramux.ops.reference import ReferenceOps

_MIN_ROWS = 8
"""Of a product. Adapters send other tokens to an expert than the base would, and a row's bits must
not hang on how many: products of fewer rows than four sum up in another order."""


class Experts(Protocol):
    """A module of transformers' experts interface that is gated."""

    gate_up_proj: Tensor
    """``[experts, 2 * intermediate, hidden]``, or its last two dimensions the other way round."""
    down_proj: Tensor
    """``[experts, hidden, intermediate]``, or the other way round."""
    is_transposed: bool
    is_concatenated: bool
    """Gate before up; else they take turns."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


def out_first(weight: Tensor, experts: object) -> Tensor:
    """A weight of all experts as ``[experts, out, in]``, whichever way it is stored."""
    return weight.transpose(1, 2) if cast(Experts, experts).is_transposed else weight


class AdaptedExperts:
    """The experts of one layer in plain torch.

    For each token and expert chosen for it: gate = Wg x + dg, up = Wu x + du, down = Wd h + dd with
    h = act(gate) * up, which has the deltas already; then the router's weight multiplies the sum.
    """

    def __init__(self, experts: nn.Module, first: int, context: LoraContext) -> None:
        """``first``: row of the slot tables where gate, up and down of expert 0 stand, then those
        of expert 1, and so on."""
        self._experts = cast(Experts, experts)
        self._context = context
        self._ops = ReferenceOps()
        self._gate_up = out_first(self._experts.gate_up_proj, experts)
        self._down = out_first(self._experts.down_proj, experts)
        self._biases: tuple[Tensor | None, Tensor | None] = (
            getattr(experts, "gate_up_proj_bias", None),
            getattr(experts, "down_proj_bias", None),
        )
        num_experts, hidden, size = self._down.shape
        into, out = self._biases
        self._into: list[Site] = []
        self._out: list[Site] = []
        for expert in range(num_experts):
            row = first + EXPERT_PARTS * expert
            bias = None if into is None else self._halves(into[expert])
            self._into.append(Site((Slice(row, 0, size), Slice(row + 1, size, size)), hidden, bias))
            bias = None if out is None else out[expert]
            self._out.append(Site((Slice(row + 2, 0, hidden),), size, bias))

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x ``[T, hidden]``, index and weights ``[T, k]`` -> ``[T, hidden]``."""
        num_tokens, top_k = index.shape
        pairs, slots = self._sorted(index)
        tokens, chosen = pairs // top_k, index.reshape(-1)[pairs]
        results = x.new_empty(num_tokens * top_k, x.shape[-1])
        ends = torch.bincount(chosen, minlength=len(self._into)).cumsum(0).tolist()
        start = 0
        for expert, end in enumerate(ends):
            if end > start:
                here = slice(start, end)
                y = self._run(expert, x[tokens[here]], None if slots is None else slots[here])
                results[pairs[here]] = y
            start = end
        weighted = results.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)
        return weighted.sum(dim=1).to(x.dtype)

    def _sorted(self, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Pairs of token and expert in order of expert, then slot; and their slots, if any counts.

        The order within is that of the tokens, so an answer does not hang on the other rows' slots.
        """
        routing = self._context.routing
        experts = index.reshape(-1)
        if not routing.segments:
            return torch.argsort(experts, stable=True), None
        slots = routing.token_slot[: index.shape[0]].repeat_interleave(index.shape[1])
        pairs = torch.argsort(experts * (routing.num_slots + 1) + slots, stable=True)
        return pairs, slots[pairs]

    def _run(self, expert: int, x: Tensor, slots: Tensor | None) -> Tensor:
        """One expert on rows that stand in order of slot."""
        runs = [] if slots is None else _runs(slots, self._context.routing.num_slots)
        num_rows = len(x)
        x = F.pad(x, (0, 0, 0, max(0, _MIN_ROWS - num_rows)))
        into, out = (None if bias is None else bias[expert] for bias in self._biases)
        gate_up = F.linear(x, self._gate_up[expert], into)
        if runs:
            halves = self._halves(gate_up)
            self._add(halves, x, runs, self._into[expert], num_rows)
            gate_up = self._by_turns(halves)
        hidden = self._experts._apply_gate(gate_up)
        down = F.linear(hidden, self._down[expert], out)
        self._add(down, hidden, runs, self._out[expert], num_rows)
        return down[:num_rows]

    def _halves(self, gate_up: Tensor) -> Tensor:
        """``[…, 2 * intermediate]`` with gate before up."""
        if self._experts.is_concatenated:
            return gate_up
        return gate_up.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def _by_turns(self, halves: Tensor) -> Tensor:
        """The reverse of ``_halves``."""
        if self._experts.is_concatenated:
            return halves
        return halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    def _add(
        self, y: Tensor, x: Tensor, runs: list[tuple[int, slice]], site: Site, num_rows: int
    ) -> None:
        """Rows from ``num_rows`` on are nobody's: the last run may take them along."""
        ctx = self._context
        for slot, rows in runs:
            end = len(x) if rows.stop == num_rows else rows.stop
            few = max(0, _MIN_ROWS - (end - rows.start))
            y_rows, x_rows = y[rows.start : end], x[rows.start : end]
            y_run, x_run = (F.pad(t, (0, 0, 0, few)) if few else t for t in (y_rows, x_rows))
            self._ops.add_rows(y_run, x_run, slot, site, ctx.arena, ctx.tables)
            if few:
                y_rows.copy_(y_run[:-few])


def _runs(slots: Tensor, base: int) -> list[tuple[int, slice]]:
    """Runs of equal slots, without the base's."""
    values, counts = torch.unique_consecutive(slots, return_counts=True)
    found, start = [], 0
    for slot, count in zip(values.tolist(), counts.tolist(), strict=True):
        if slot != base:
            found.append((slot, slice(start, start + count)))
        start += count
    return found


class GroupedExperts(nn.Module):
    """The same by kernels over all experts, for an op that has such (``LoraOps.experts``).

    All that is particular to one layer is a tensor, so that layers share their compilation.
    """

    gate_up: Tensor
    down: Tensor
    arena: Tensor

    def __init__(
        self, experts: nn.Module, first: int, context: LoraContext, activation: str
    ) -> None:
        """``first`` as for AdaptedExperts; ``activation``: the gate's, as the kernels call it."""
        super().__init__()
        assert context.ops.experts is not None
        weights = cast(Experts, experts)
        table = context.tables.table[first : first + EXPERT_PARTS * len(weights.down_proj)]
        self.register_buffer("gate_up", weights.gate_up_proj.detach(), persistent=False)
        self.register_buffer("down", weights.down_proj.detach(), persistent=False)
        self.register_buffer("arena", context.arena, persistent=False)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("token_slot", context.routing.token_slot, persistent=False)
        self.register_buffer("token_count", context.routing.token_count, persistent=False)
        self.activation = activation
        self.form = context.form
        self.number = context.ops.experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x ``[T, hidden]``, index and weights ``[T, k]`` -> ``[T, hidden]``."""
        return run_experts(
            x,
            index,
            weights,
            self.gate_up,
            self.down,
            self.arena,
            self.table,
            self.token_slot,
            self.token_count,
            self.activation,
            self.form.value is not Form.NONE,
            self.number,
        )

    def rehearse(self, num_rows: int, top_k: int) -> None:
        """Launch the experts of so many tokens without adapters and with, for what is made at a
        first launch."""
        x = self.arena.new_zeros(num_rows, self.down.shape[1])
        weights = self.arena.new_zeros(num_rows, top_k)
        for form in (Form.NONE, Form.BESIDE):
            self.form.set(form)
            self(x, weights.long(), weights)


class AdaptedRouter(Wrapper):
    """A router whose weight an adapter may have its own of."""

    def __init__(self, base: nn.Module, context: LoraContext, place: int) -> None:
        """``place``: among the own parts."""
        super().__init__(base, context)
        self.form = context.form
        self.own = context.own.number
        self.register_buffer("place", torch.tensor(place), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x ``[…, hidden]`` -> what the base's router makes of it, of which all have T rows."""
        results = self.base(x)
        if self.form.own:
            rows = x.reshape(-1, x.shape[-1])
            results = tuple(own_results(list(results), rows, self.place, self.own))
        return results
