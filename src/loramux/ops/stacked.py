"""The LoRA op for steps of few rows, where a product costs more to start than to compute.

In bfloat16 on a CPU every product takes some 25 us before it does anything, and the reference op
needs two for each adapter and slice. Here segments that stand side by side and have few rows
together share them: x by the A of all their adapters and slices, each row's columns of other
adapters set to zero, and for each slice the result by the B of all adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loramux.ops.interface import Segment, Site, SlotTables
from loramux.ops.layout import NO_GAIN, OFFSET_G
from loramux.ops.reference import ModuleViews, ReferenceOps, module_views

MAX_ROWS = 64
"""Rows of segments that are computed together: beyond, the work for columns that are set to zero
outweighs the start of a product."""

_MAX_IDLE = 2
"""A stack is built anew when it has more than this many times the places that are wanted."""

_NOBODY = -1
"""At a place of a stack whose weights are no slot's."""

Run = tuple[Segment, ...]
"""Neighbouring segments that are computed together."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of one site in several slots, side by side: by slice, then by place."""

    ranks: tuple[int, ...]
    """Of every slice at every place, in the order of the columns."""
    a_t: Tensor
    """``[in, sum of ranks]``"""
    b_t: tuple[Tensor, ...]
    """For each slice ``[sum of its ranks, out]``."""
    ends: tuple[int, ...]
    """For each slice, where its columns end."""

    def ranks_at(self, place: int) -> tuple[int, ...]:
        """The rank of each slice at one place."""
        return self.ranks[place :: len(self.ranks) // len(self.b_t)]

    def put(self, place: int, views: Sequence[ModuleViews]) -> None:
        """Copy one slot's weights, whose ranks are those of the place."""
        num_places, start = len(self.ranks) // len(self.b_t), 0
        for index, (view, b_t, end) in enumerate(zip(views, self.b_t, self.ends, strict=True)):
            first = index * num_places
            row = sum(self.ranks[first : first + place])
            rank = self.ranks[first + place]
            if view.a_t is not None:
                self.a_t[:, start + row : start + row + rank].copy_(view.a_t)
                b_t[row : row + rank].copy_(view.b_t)
            start = end


@dataclass(slots=True)
class _Stack:
    slots: tuple[int, ...]
    """Whose weights stand at each place."""
    versions: dict[int, int]
    """Of each of these slots, when its weights were copied."""
    weights: _Weights | None = None
    """None if B is not finite: then zero times B would not be zero."""
    with_gain: frozenset[int] = frozenset()
    """Slots whose DoRA gain some module of the site has."""


class StackedOps(ReferenceOps):
    """Computes small segments together, large ones as the reference does.

    Keeps a second copy of the weights that take part, with at most as many places again.
    """

    name = "stacked"

    def __init__(self) -> None:
        super().__init__()
        self._stacks: dict[int, _Stack] = {}
        self._segments: tuple[Segment, ...] = ()
        self._runs: list[Run] = []
        self._shared_slots: tuple[int, ...] = ()
        self._masks: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def _add_sorted(
        self,
        y: Tensor,
        x: Tensor,
        segments: tuple[Segment, ...],
        site: Site,
        arena: Tensor,
        tables: SlotTables,
    ) -> None:
        if segments != self._segments:
            self._set_segments(segments)
        stack = self._stack_of(site, arena, tables) if self._shared_slots else None
        if stack is None or stack.weights is None:
            super()._add_sorted(y, x, segments, site, arena, tables)
            return
        for index, run in enumerate(self._runs):
            if len(run) == 1:
                super()._add_sorted(y, x, run, site, arena, tables)
            else:
                rows = slice(run[0].start, run[-1].end)
                self._add_run(y[rows], x[rows], index, site, stack.slots, stack.weights)
                for segment in run:
                    if segment.slot in stack.with_gain:
                        own = y[segment.start : segment.end]
                        self._scale_rows(own, segment.slot, site, arena, tables)

    def _set_segments(self, segments: tuple[Segment, ...]) -> None:
        self._segments = segments
        self._runs = group(segments)
        self._shared_slots = tuple(s.slot for run in self._runs if len(run) > 1 for s in run)
        self._masks.clear()

    def _add_run(
        self,
        y: Tensor,
        x: Tensor,
        index: int,
        site: Site,
        slots: tuple[int, ...],
        weights: _Weights,
    ) -> None:
        if not any(weights.ranks):
            return
        key = (index, slots, weights.ranks)
        if key not in self._masks:
            self._masks[key] = _mask(self._runs[index], slots * len(site.slices), weights.ranks)
        # Set to zero, not multiplied by it: another adapter's column may be infinite or NaN.
        own = x.mm(weights.a_t).masked_fill_(self._masks[key], 0.0)
        start = 0
        for part, b_t, end in zip(site.slices, weights.b_t, weights.ends, strict=True):
            if end > start:
                y[:, part.start : part.start + part.size].addmm_(own[:, start:end], b_t)
            start = end

    def _stack_of(self, site: Site, arena: Tensor, tables: SlotTables) -> _Stack:
        """The site's weights in all slots that share products in this step."""
        key, wanted = site.slices[0].module, self._shared_slots
        stack = self._stacks.get(key)
        if (
            stack is None
            or len(stack.slots) > _MAX_IDLE * len(wanted)
            or not _refill(stack, site, wanted, arena, tables)
        ):
            stack = self._stacks[key] = _build(site, wanted, arena, tables)
        return stack


def group(segments: Sequence[Segment]) -> list[Run]:
    """Neighbours together, as long as they have at most ``MAX_ROWS`` rows."""
    runs: list[Run] = []
    for segment in segments:
        if runs and segment.end - runs[-1][0].start <= MAX_ROWS:
            runs[-1] += (segment,)
        else:
            runs.append((segment,))
    return runs


def _refill(
    stack: _Stack, site: Site, wanted: Sequence[int], arena: Tensor, tables: SlotTables
) -> bool:
    """Copy what has changed, to places that nobody wants; False, and no change, if that fails.

    A place takes weights of its own ranks alone. In most steps nothing has changed, and where
    adapters come and go one by one the others' weights stay where they are.
    """
    stale = [slot for slot in wanted if stack.versions.get(slot) != tables.version[slot]]
    if not stale:
        return True
    if stack.weights is None:
        return False
    views = {slot: _views(site, slot, arena, tables) for slot in stale}
    kept = set(wanted).difference(stale)
    free = [place for place, slot in enumerate(stack.slots) if slot not in kept]
    # Those of idle slots last: they may be wanted again as they are.
    free.sort(key=lambda place: stack.slots[place] not in (_NOBODY, *stale))
    places = _choose_places(stack.weights, free, views)
    if places is None:
        return False
    slots = list(stack.slots)
    for slot, place in places.items():
        slots[place] = slot
        stack.weights.put(place, views[slot])
        free.remove(place)
    # A slot that moved leaves a place behind whose columns must not count as its own.
    slots = [_NOBODY if p in free and slot in stale else slot for p, slot in enumerate(slots)]
    current = {slot: tables.version[slot] for slot in stale}
    stack.versions = {slot: v for slot, v in stack.versions.items() if slot in slots} | current
    stack.slots = tuple(slots)
    stack.with_gain = _with_gain(site, stack.versions, tables)
    return True


def _choose_places(
    weights: _Weights, free: Sequence[int], views: Mapping[int, Sequence[ModuleViews]]
) -> dict[int, int] | None:
    """A free place for each slot, or None: the first that has its ranks, if its B is finite."""
    left, places = list(free), dict[int, int]()
    for slot, of_slot in views.items():
        ranks = tuple(view.b_t.shape[0] for view in of_slot)
        place = next((place for place in left if weights.ranks_at(place) == ranks), None)
        if place is None or not all(_is_finite(view.b_t) for view in of_slot):
            return None
        left.remove(place)
        places[slot] = place
    return places


def _build(site: Site, wanted: Sequence[int], arena: Tensor, tables: SlotTables) -> _Stack:
    """Copy the weights of one site in these slots, with room for as many as a power of two.

    Else a step of one adapter more than ever before would build every stack anew.
    """
    versions = {slot: tables.version[slot] for slot in wanted}
    views = [_views(site, slot, arena, tables) for slot in wanted]
    num_spare = (1 << (len(wanted) - 1).bit_length()) - len(wanted)
    slots = (*wanted, *[_NOBODY] * num_spare)
    a_parts: list[Tensor] = []
    b_stacks: list[Tensor] = []
    ranks: list[int] = []
    ends: list[int] = []
    for index, part in enumerate(site.slices):
        own = [of_slot[index] for of_slot in views]
        of_part = [view.b_t.shape[0] for view in own]
        spare = num_spare * of_part[-1]  # next may come one like the last
        a_parts += [view.a_t.t() for view in own if view.a_t is not None]
        a_parts.append(arena.new_zeros(spare, site.in_features))
        b_parts = [view.b_t for view in own if view.a_t is not None]
        b_stacks.append(torch.cat([*b_parts, arena.new_zeros(spare, part.size)]))
        ranks += [*of_part, *[of_part[-1]] * num_spare]
        ends.append(sum(ranks))
    if not all(map(_is_finite, b_stacks)):
        return _Stack(slots, versions)
    weights = _Weights(tuple(ranks), torch.cat(a_parts).t(), tuple(b_stacks), tuple(ends))
    return _Stack(slots, versions, weights, _with_gain(site, wanted, tables))


def _views(site: Site, slot: int, arena: Tensor, tables: SlotTables) -> list[ModuleViews]:
    return [module_views(part, slot, site.in_features, arena, tables) for part in site.slices]


def _with_gain(site: Site, slots: Iterable[int], tables: SlotTables) -> frozenset[int]:
    modules = [part.module for part in site.slices]
    gains = {slot: tables.host[modules, slot, OFFSET_G] for slot in slots}
    return frozenset(slot for slot in slots if (gains[slot] != NO_GAIN).any())


def _is_finite(x: Tensor) -> bool:
    """Whether x has neither infinities nor NaN, in one pass and without a mask of its size."""
    return not x.numel() or all(end.isfinite() for end in x.aminmax())


def _mask(run: Run, slots: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """``[rows, columns]`` bool: the column is of another adapter than the row."""
    columns = torch.tensor(slots).repeat_interleave(torch.tensor(ranks))
    counts = torch.tensor([segment.end - segment.start for segment in run])
    rows = torch.tensor([segment.slot for segment in run]).repeat_interleave(counts)
    return rows[:, None] != columns
