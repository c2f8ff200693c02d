"""A step's rows cut into pieces of work for the kernels: few rows of one slot each."""

from __future__ import annotations

import numpy as np
import torch

from loramux.ops.tiles import LONG_FROM, SHORT_ROWS, block_rows_of
from loramux.ops.upload import Uploads


class SegmentBuffers:
    """Fixed device buffers for the segments of one step."""

    def __init__(
        self, num_slots: int, max_tokens: int, device: torch.device, uploads: Uploads
    ) -> None:
        self._num_slots = num_slots
        self._uploads = uploads
        capacity = max(
            rows // block_rows for block_rows, rows in padded_rows(num_slots, max_tokens).items()
        )
        self.slot = torch.full((capacity,), num_slots, dtype=torch.int32, device=device)
        self.start = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.rows = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.block_rows = SHORT_ROWS
        self.grid = 0

    def fill(self, slot_start: np.ndarray) -> None:
        """Cut the sorted rows; ``slot_start [slots + 2]`` says where each slot's begin."""
        num_rows = int(slot_start[-1])
        self.block_rows = block_rows_of(num_rows)
        self.grid = capacity_of(num_rows, self._num_slots, self.block_rows)
        counts = np.diff(slot_start)
        pieces = -(-counts // self.block_rows)
        slot = np.repeat(np.arange(len(counts), dtype=np.int32), pieces)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        within = (np.arange(slot.size) - first) * self.block_rows
        rows = np.zeros(self.grid, dtype=np.int32)
        rows[: slot.size] = np.minimum(counts[slot] - within, self.block_rows)
        self._uploads.copy(self.slot, slot)
        self._uploads.copy(self.start, (slot_start[slot] + within).astype(np.int32))
        self._uploads.copy(self.rows, rows)


def padded_rows(num_slots: int, max_tokens: int) -> dict[int, int]:
    """Most rows that all segments of a step have together when each counts as full.

    By the rows of a segment: short ones, and long ones where steps can be so large.
    """
    return {
        block_rows_of(rows): block_rows_of(rows) * capacity_of(rows, num_slots, block_rows_of(rows))
        for rows in {min(max_tokens, LONG_FROM - 1), max_tokens}
    }


def capacity_of(num_rows: int, num_slots: int, block_rows: int) -> int:
    """Most segments that rows of up to ``num_slots`` adapters and the base can make."""
    return min(num_rows, num_slots + 1 + num_rows // block_rows)
