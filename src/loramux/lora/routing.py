"""Token -> slot of this step, in buffers whose addresses never change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loramux.lora.segments import SegmentBuffers
from loramux.ops.interface import Segment
from loramux.ops.tiles import FEW_ADAPTERS
from loramux.ops.upload import Uploads
from loramux.types import Slot


class Routing:
    """What the LoRA ops know of a step.

    ``token_slot [T]`` int32: slot of each row. ``sorted_rows [T]`` int32: the rows in stable order
    of slot, the base's last. ``slot_start [slots + 2]`` int32: where each slot's rows begin in that
    order; the last entry is T. Rows beyond ``num_tokens`` are padding of the base slot;
    ``token_count [1]`` int32 says so on the device.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, device: torch.device, uploads: Uploads | None = None
    ) -> None:
        """With ``uploads`` a step is on the device when their owner has flushed them; else ``fill``
        sees to it itself."""
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self._uploads = uploads or Uploads(device)
        self._flushes = uploads is None
        self.token_slot = torch.full((max_tokens,), num_slots, dtype=torch.int32, device=device)
        self.sorted_rows = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self.token_count = torch.zeros(1, dtype=torch.int32, device=device)
        self.slot_start = torch.zeros(num_slots + 2, dtype=torch.int32, device=device)
        self._segments = SegmentBuffers(num_slots, max_tokens, device, self._uploads)
        self._adapter_rows: torch.Tensor | None = None
        self.num_tokens = 0
        self.segments: tuple[Segment, ...] = ()
        """Host copy of the sorted order's runs; empty when only the base takes part."""
        self.in_order = True
        """The rows stand in sorted order already, so ``sorted_rows`` is 0, 1, 2, …"""

    @property
    def device_segments(self) -> SegmentBuffers:
        """The same for kernels: short segments in buffers on the device."""
        return self._segments

    @property
    def adapter_rows(self) -> torch.Tensor:
        """int64: ``sorted_rows`` without the base's, for torch's own indexing. Kernels need none of
        it, so it is made when a step first asks."""
        if self._adapter_rows is None:
            end = self.segments[-1].end if self.segments else 0
            self._adapter_rows = self.sorted_rows[:end].long()
        return self._adapter_rows

    def rows_of(self, segment: Segment) -> slice | torch.Tensor:
        """A segment's rows as they stand in the step, for torch's own indexing."""
        if self.in_order:
            return slice(segment.start, segment.end)
        return self.adapter_rows[segment.start : segment.end]

    def fill(
        self,
        slots: Sequence[Slot],
        tokens_per_seq: Sequence[int],
        num_rows: int | None = None,
        *,
        few: bool = False,
    ) -> None:
        """Set a step up from each sequence's slot and its number of tokens.

        ``num_rows`` are computed, padding included; by default there is none. ``few`` cuts segments
        for at most ``FEW_ADAPTERS`` adapters, which the step must then keep to.
        """
        expanded = np.repeat(
            np.asarray(slots, dtype=np.int32), np.asarray(tokens_per_seq, dtype=np.int64)
        )
        self.num_tokens = expanded.size
        num_rows = num_rows or self.num_tokens
        assert expanded.size <= num_rows <= self.max_tokens, "the tokens do not fit into a step"
        token_slot = np.full(num_rows, self.num_slots, dtype=np.int32)
        token_slot[: expanded.size] = expanded
        order = np.argsort(token_slot, kind="stable").astype(np.int32)
        counts = np.bincount(token_slot, minlength=self.num_slots + 1)
        starts = np.zeros(self.num_slots + 2, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        self.in_order = bool((expanded[:-1] <= expanded[1:]).all())
        self.segments = tuple(
            Segment(slot, int(starts[slot]), int(starts[slot + 1]))
            for slot in np.flatnonzero(counts[: self.num_slots]).tolist()
        )
        assert not few or len(self.segments) <= FEW_ADAPTERS, "these adapters are not few"
        self._adapter_rows = None
        if self._flushes:
            self._uploads.begin_step()
        self._segments.fill(starts, few=few)
        self._uploads.copy(self.token_slot, token_slot)
        self._uploads.copy(self.sorted_rows, order)
        self._uploads.copy(self.slot_start, starts)
        self._uploads.copy(self.token_count, np.array([self.num_tokens], dtype=np.int32))
        if self._flushes:
            self._uploads.flush()
