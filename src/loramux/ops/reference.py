"""The LoRA op in plain torch: what every kernel is compared with, and what runs on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loramux.ops.interface import Routing, Segment, Site, Slice, SlotTables
from loramux.ops.layout import ALIGN_BYTES, NO_GAIN, pad


@dataclass(frozen=True, slots=True)
class ModuleViews:
    """One module's weights in one slot, as matrices over the arena."""

    version: int
    """Of the slot, when the views were made."""
    a_t: Tensor | None
    """A transposed, ``[in, r]``; None where the rank is 0."""
    b_t: Tensor
    """B transposed, ``[r, out]``."""
    gain: Tensor | None


class ReferenceOps:
    """Works through the segments of a step: two products for each adapter and slice.

    Belongs to one model: views are kept by module and slot.
    """

    name = "reference"
    experts = None

    def __init__(self) -> None:
        # Making three views costs as much as a small product, so they are kept while the slot
        # stays what it is.
        self._views: dict[tuple[int, int], ModuleViews] = {}

    def begin_step(self, max_rank: int, *, few: bool) -> None:
        """Nothing here depends on them."""

    def lora_add_(
        self, y: Tensor, x: Tensor, site: Site, arena: Tensor, tables: SlotTables, routing: Routing
    ) -> None:
        segments = routing.segments
        if not segments:
            return
        if routing.in_order:
            self._add_sorted(y, x, segments, site, arena, tables)
            return
        # The adapters' rows come first in sorted order. index_copy_ takes int64 only.
        rows = routing.adapter_rows
        y_rows = y.index_select(0, rows)
        self._add_sorted(y_rows, x.index_select(0, rows), segments, site, arena, tables)
        y.index_copy_(0, rows, y_rows)

    def _add_sorted(
        self,
        y: Tensor,
        x: Tensor,
        segments: tuple[Segment, ...],
        site: Site,
        arena: Tensor,
        tables: SlotTables,
    ) -> None:
        """Rows stand in sorted order."""
        for segment in segments:
            y_rows, x_rows = y[segment.start : segment.end], x[segment.start : segment.end]
            self.add_rows(y_rows, x_rows, segment.slot, site, arena, tables)

    def add_rows(
        self, y: Tensor, x: Tensor, slot: int, site: Site, arena: Tensor, tables: SlotTables
    ) -> None:
        """All rows belong to one slot."""
        for part in site.slices:
            views = self._views_of(part, slot, site, arena, tables)
            if views.a_t is None:
                continue
            whole = part.start == 0 and part.size == y.shape[1]
            y_part = y if whole else y[:, part.start : part.start + part.size]
            y_part.addmm_(x.mm(views.a_t), views.b_t)
            if views.gain is not None:
                _scale(y_part, views.gain, part, site)

    def _scale_rows(
        self, y: Tensor, slot: int, site: Site, arena: Tensor, tables: SlotTables
    ) -> None:
        """Apply the gains of a slot to rows that have its delta already."""
        for part in site.slices:
            gain = self._views_of(part, slot, site, arena, tables).gain
            if gain is not None:
                _scale(y[:, part.start : part.start + part.size], gain, part, site)

    def _views_of(
        self, part: Slice, slot: int, site: Site, arena: Tensor, tables: SlotTables
    ) -> ModuleViews:
        views = self._views.get((part.module, slot))
        if views is None or views.version != tables.version[slot]:
            views = module_views(part, slot, site.in_features, arena, tables)
            self._views[part.module, slot] = views
        return views


def _scale(y: Tensor, gain: Tensor, part: Slice, site: Site) -> None:
    """DoRA: y = g * (y - bias) + bias, in place, over the columns of one slice."""
    if site.bias is None:
        y.mul_(gain)
    else:
        bias = site.bias[part.start : part.start + part.size]
        y.sub_(bias).mul_(gain).add_(bias)


def module_views(
    part: Slice, slot: int, in_features: int, arena: Tensor, tables: SlotTables
) -> ModuleViews:
    """Where a slot's weights of one module stand now."""
    offset_a, offset_b, offset_g, rank = tables.host[part.module, slot].tolist()
    version = tables.version[slot]
    if rank == 0:
        return ModuleViews(version, None, arena[:0], None)
    unit = ALIGN_BYTES // arena.element_size()
    in_pad, rank_pad = pad(in_features), pad(rank)
    start_a, start_b = offset_a * unit, offset_b * unit
    a = arena[start_a : start_a + rank * in_pad].view(rank, in_pad)[:, :in_features]
    b = arena[start_b : start_b + part.size * rank_pad].view(part.size, rank_pad)[:, :rank]
    gain = None
    if offset_g != NO_GAIN:
        start_g = offset_g * unit
        gain = arena[start_g : start_g + part.size]
    return ModuleViews(version, a.t(), b.t(), gain)
