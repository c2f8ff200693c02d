"""A step's rows cut into pieces of work for the kernels: few rows of one slot each."""

from __future__ import annotations

import numpy as np
import torch

SHORT_ROWS = 16
LONG_ROWS = 64
"""Rows of a segment: the least a matrix unit takes, and what re-reads weights less in a prefill."""
LONG_FROM = 1024
"""Rows of a step from which on segments are long."""


class SegmentBuffers:
    """Fixed device buffers for the segments of one step."""

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        self._num_slots = num_slots
        capacity = max(
            capacity_of(rows, num_slots, block_rows_of(rows)) for rows in _largest_steps(max_tokens)
        )
        self.slot = torch.full((capacity,), num_slots, dtype=torch.int32, device=device)
        self.start = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.rows = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.block_rows = SHORT_ROWS
        self.grid = 0

    def fill(self, slot_start: np.ndarray, num_rows: int) -> None:
        """Cut the sorted rows; ``slot_start [slots + 2]`` says where each slot's begin.

        ``num_rows`` is the bucket: all rows, padding included, which belong to the base.
        """
        self.block_rows = block_rows_of(num_rows)
        self.grid = capacity_of(num_rows, self._num_slots, self.block_rows)
        counts = np.diff(np.minimum(slot_start, num_rows))
        pieces = -(-counts // self.block_rows)
        slot = np.repeat(np.arange(len(counts), dtype=np.int32), pieces)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces)
        within = (np.arange(slot.size) - first) * self.block_rows
        rows = np.zeros(self.slot.numel(), dtype=np.int32)
        rows[: slot.size] = np.minimum(counts[slot] - within, self.block_rows)
        _copy(self.slot, slot)
        _copy(self.start, (slot_start[slot] + within).astype(np.int32))
        _copy(self.rows, rows)


def max_padded_rows(num_slots: int, max_tokens: int) -> int:
    """Most rows that all segments of a step have together, when each counts as full."""
    return max(
        block_rows_of(rows) * capacity_of(rows, num_slots, block_rows_of(rows))
        for rows in _largest_steps(max_tokens)
    )


def _largest_steps(max_tokens: int) -> set[int]:
    """The largest step of each kind of segments."""
    return {min(max_tokens, LONG_FROM - 1), max_tokens}


def block_rows_of(num_rows: int) -> int:
    """Rows of a segment in a step of this many."""
    return LONG_ROWS if num_rows >= LONG_FROM else SHORT_ROWS


def capacity_of(num_rows: int, num_slots: int, block_rows: int) -> int:
    """Most segments that rows of up to ``num_slots`` adapters and the base can make."""
    return min(num_rows, num_slots + 1 + num_rows // block_rows)


def _copy(target: torch.Tensor, values: np.ndarray) -> None:
    target[: values.size].copy_(torch.from_numpy(values), non_blocking=True)
