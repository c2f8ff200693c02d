"""The LoRA op for steps of few rows, where a product costs more to start than to compute.

In bfloat16 on a CPU every product costs some 25 us before it does anything, and the reference op
needs two for each adapter. Here segments that stand side by side and have few rows together share
two products: x by the A of all their adapters, each row's columns of other adapters set to zero,
and the result by all B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.ops.interface import Routing, Segment, Site, Slice, SlotTables
from loramux.ops.reference import ReferenceOps, module_views

MAX_ROWS = 64
"""Rows of segments that are computed together: beyond, the work for columns that are set to zero
outweighs the start of a product."""

_MAX_IDLE = 4
"""A stack is built anew when it has this many times the slots that are wanted."""

Run = tuple[Segment, ...]
"""Neighbouring segments that are computed together."""

Columns = tuple[tuple[int, int, int], ...]
"""``(slot, start, end)`` in ascending order: which columns of a stack are whose."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """The weights of one module in several slots, side by side."""

    versions: dict[int, int]
    """Version of each slot, when its weights were copied."""
    columns: Columns
    """Columns of ``a_t``, rows of ``b_t``."""
    a_t: Tensor
    """``[in, sum of ranks]``"""
    b_t: Tensor
    """``[sum of ranks, out]``"""
    usable: bool
    """No slot has a gain, and B is finite: else a zero would not stay one."""


class StackedOps:
    """Computes small segments together and leaves large ones, and DoRA, to the reference op.

    Keeps a second copy of the weights that take part, at most as large as the arena. Belongs to
    one model.
    """

    name = "stacked"

    def __init__(self) -> None:
        self._one_by_one = ReferenceOps()
        self._stacks: dict[int, _Stack] = {}
        self._segments: tuple[Segment, ...] = ()
        self._runs: list[Run] = []
        self._shared_slots: tuple[int, ...] = ()
        self._masks: dict[tuple[int, Columns], tuple[int, int, Tensor]] = {}

    def lora_add_(
        self, y: Tensor, x: Tensor, site: Site, arena: Tensor, tables: SlotTables, routing: Routing
    ) -> None:
        if not routing.in_order:
            self._one_by_one.lora_add_(y, x, site, arena, tables, routing)
            return
        if routing.segments is not self._segments:
            self._begin_step(routing.segments)
        stacks = self._stacks_of(site, arena, tables) if self._shared_slots else []
        usable = all(stack.usable for stack in stacks)
        for index, run in enumerate(self._runs):
            if len(run) > 1 and usable:
                rows = slice(run[0].start, run[-1].end)
                for part, stack in zip(site.slices, stacks, strict=True):
                    y_part = y[rows, part.start : part.start + part.size]
                    self._add_run_(y_part, x[rows], index, stack)
            else:
                for segment in run:
                    self._one_by_one.add_segment_(y, x, segment, site, arena, tables)

    def _begin_step(self, segments: tuple[Segment, ...]) -> None:
        changed = segments != self._segments
        self._segments = segments
        if changed:
            self._runs = group(segments)
            self._shared_slots = tuple(s.slot for run in self._runs if len(run) > 1 for s in run)
            self._masks.clear()

    def _add_run_(self, y: Tensor, x: Tensor, index: int, stack: _Stack) -> None:
        key = (index, stack.columns)
        if key not in self._masks:
            self._masks[key] = _mask(self._runs[index], stack.columns)
        start, end, others = self._masks[key]
        if start == end:
            return
        # Set to zero, not multiplied by it: another adapter's column may be infinite or NaN.
        own = x.mm(stack.a_t[:, start:end]).masked_fill_(others, 0.0)
        y.addmm_(own, stack.b_t[start:end])

    def _stacks_of(self, site: Site, arena: Tensor, tables: SlotTables) -> list[_Stack]:
        wanted, stacks = self._shared_slots, []
        for part in site.slices:
            stack = self._stacks.get(part.module)
            if (
                stack is None
                or len(stack.versions) > _MAX_IDLE * len(wanted)
                or any(stack.versions.get(slot) != tables.version[slot] for slot in wanted)
            ):
                stack = _build(part, wanted, site.in_features, arena, tables)
                self._stacks[part.module] = stack
            stacks.append(stack)
        return stacks


def group(segments: Sequence[Segment]) -> list[Run]:
    """Neighbours together, as long as they have at most ``MAX_ROWS`` rows."""
    runs: list[Run] = []
    for segment in segments:
        if runs and segment.end - runs[-1][0].start <= MAX_ROWS:
            runs[-1] += (segment,)
        else:
            runs.append((segment,))
    return runs


def _build(
    part: Slice, slots: Sequence[int], in_features: int, arena: Tensor, tables: SlotTables
) -> _Stack:
    """Copy the weights of one module in these slots, which are in ascending order."""
    a_parts = [arena.new_empty(in_features, 0)]
    b_parts = [arena.new_empty(0, part.size)]
    columns: list[tuple[int, int, int]] = []
    end, gains = 0, False
    for slot in slots:
        views = module_views(part, slot, in_features, arena, tables)
        start = end
        if views.a_t is not None:
            a_parts.append(views.a_t)
            b_parts.append(views.b_t)
            end += views.b_t.shape[0]
            gains |= views.gain is not None
        columns.append((slot, start, end))
    b_t = torch.cat(b_parts)
    return _Stack(
        versions={slot: tables.version[slot] for slot in slots},
        columns=tuple(columns),
        a_t=torch.cat([a.t() for a in a_parts]).t(),
        b_t=b_t,
        usable=not gains and bool(b_t.isfinite().all()),
    )


def _mask(run: Run, columns: Columns) -> tuple[int, int, Tensor]:
    """First and last column of a run, and ``[rows, columns]`` bool: not the row's adapter's."""
    span = {slot: (start, end) for slot, start, end in columns}
    first, last = span[run[0].slot][0], span[run[-1].slot][1]
    others = torch.ones(run[-1].end - run[0].start, last - first, dtype=torch.bool)
    for segment in run:
        start, end = span[segment.slot]
        rows = slice(segment.start - run[0].start, segment.end - run[0].start)
        others[rows, start - first : end - first] = False
    return first, last, others
