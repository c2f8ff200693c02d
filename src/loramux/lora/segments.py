"""A step's rows cut into pieces of work for the kernels: few rows of one slot each."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from loramux.ops.tiles import FEW_ADAPTERS, LONG_FROM, MIDDLE_FROM, SHORT_ROWS, block_rows_of
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

    def fill(self, slot_start: np.ndarray, *, few: bool) -> None:
        """Cut the sorted rows; ``slot_start [slots + 2]`` says where each slot's begin."""
        num_rows = int(slot_start[-1])
        self.block_rows = block_rows_of(num_rows, few)
        self.grid = capacity_of(num_rows, self._num_slots, few=few)
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

    By the rows of a segment: of each length that occurs in steps of up to ``max_tokens`` rows.
    """
    largest_steps = {min(rows, max_tokens) for rows in (MIDDLE_FROM - 1, LONG_FROM - 1, max_tokens)}
    most: dict[int, int] = {}
    for few, rows in itertools.product((False, True), largest_steps):
        block_rows = block_rows_of(rows, few)
        padded = block_rows * capacity_of(rows, num_slots, few=few)
        most[block_rows] = max(padded, most.get(block_rows, 0))
    return most


def capacity_of(num_rows: int, num_slots: int, *, few: bool) -> int:
    """Most segments that so many rows can make, of the base and of few adapters or all slots'."""
    num_adapters = min(FEW_ADAPTERS, num_slots) if few else num_slots
    return min(num_rows, num_adapters + 1 + num_rows // block_rows_of(num_rows, few))
