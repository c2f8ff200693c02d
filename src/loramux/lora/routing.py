"""Token -> slot of this step, in buffers whose addresses never change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loramux.lora.segments import SegmentBuffers
from loramux.ops.interface import Segment
from loramux.types import Slot


class Routing:
    """What the LoRA ops know of a step.

    ``token_slot [T]`` int32: slot of each row. ``sorted_rows [T]`` int32: the rows in stable order
    of slot, the base's last. ``slot_start [slots + 2]`` int32: where each slot's rows begin in that
    order; the last entry is T. Rows beyond ``num_tokens`` point at the base slot.
    """

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.token_slot = torch.full((max_tokens,), num_slots, dtype=torch.int32, device=device)
        self.sorted_rows = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self.slot_start = torch.zeros(num_slots + 2, dtype=torch.int32, device=device)
        self.slot_start[-1] = max_tokens
        self._segments = SegmentBuffers(num_slots, max_tokens, device)
        self.adapter_rows = torch.empty(0, dtype=torch.int64, device=device)
        self.num_tokens = 0
        self.segments: tuple[Segment, ...] = ()
        """Host copy of the sorted order's runs; empty when only the base takes part."""
        self.in_order = True
        """The rows stand in sorted order already, so ``sorted_rows`` is 0, 1, 2, …"""

    @property
    def device_segments(self) -> SegmentBuffers:
        """The same for kernels: short segments in buffers on the device."""
        return self._segments

    def fill(
        self, slots: Sequence[Slot], tokens_per_seq: Sequence[int], bucket: int | None = None
    ) -> None:
        """Set a step up from each sequence's slot and its number of tokens.

        ``bucket`` is the number of rows that will be computed, padding included; by default there
        is none.
        """
        token_slot = np.full(self.max_tokens, self.num_slots, dtype=np.int32)
        expanded = np.repeat(
            np.asarray(slots, dtype=np.int32), np.asarray(tokens_per_seq, dtype=np.int64)
        )
        assert expanded.size <= self.max_tokens, f"{expanded.size} tokens do not fit into a step"
        self.num_tokens = expanded.size
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
        num_adapter_rows = self.segments[-1].end if self.segments else 0
        self.adapter_rows = self.sorted_rows.new_tensor(order[:num_adapter_rows], dtype=torch.int64)
        self._segments.fill(starts, bucket or self.num_tokens)
        self.token_slot.copy_(torch.from_numpy(token_slot), non_blocking=True)
        self.sorted_rows.copy_(torch.from_numpy(order), non_blocking=True)
        self.slot_start.copy_(torch.from_numpy(starts), non_blocking=True)
