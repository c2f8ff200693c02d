"""The slot tables: for each module and slot, where A, B and g stand and what the rank is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loramux.lora.weights import Placement
from loramux.ops.layout import NO_GAIN, OFFSET_A, OFFSET_B, OFFSET_G, RANK, RECORD
from loramux.types import Slot


class SlotTables:
    """One record (see ``ops/layout.py``) for each module and slot, the last slot being the base's.

    ``table`` ``[modules, slots + 1, 4]`` int64 is the device's, ``host`` the same as a numpy array.
    Rank 0 means "no weights here" and is never dereferenced. Changes are made to the host's;
    ``flush`` copies them in one piece.
    """

    def __init__(self, num_modules: int, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        staged = torch.zeros(num_modules, num_slots + 1, RECORD, dtype=torch.int64)
        self._staged = staged.pin_memory() if device.type == "cuda" else staged
        self.host = self._staged.numpy()
        self.table = staged.to(device, copy=True)
        self.version = [0] * (num_slots + 1)
        """Grows with every change of a slot's column, so that what was derived from it can tell."""
        self.max_rank = [0] * (num_slots + 1)
        """Largest rank of each slot's adapter."""
        self.has_gain = [False] * (num_slots + 1)
        """Whether each slot's adapter has DoRA anywhere."""
        self._dirty = False
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def set(self, slot: Slot, placements: Sequence[Placement], start: int) -> None:
        """Write a column; ``start`` is the block's first unit in the arena."""
        self.clear(slot)
        assert 0 <= start <= np.iinfo(np.int64).max // 2, "an offset would not fit into int64"
        for p in placements:
            record = self.host[p.module, slot]
            record[OFFSET_A] = start + p.offset_a
            record[OFFSET_B] = start + p.offset_b
            record[OFFSET_G] = start + p.offset_g if p.has_gain else NO_GAIN
            record[RANK] = p.rank
            assert (record[OFFSET_G] != NO_GAIN) == p.has_gain
        self.max_rank[slot] = max((p.rank for p in placements), default=0)
        self.has_gain[slot] = any(p.has_gain for p in placements)

    def clear(self, slot: Slot) -> None:
        """Make a column that of the base model."""
        assert slot != self.num_slots, "the base model's column is fixed"
        if self._copied is not None:
            self._copied.synchronize()  # the last flush may still be reading
        self.host[:, slot] = 0
        self.max_rank[slot], self.has_gain[slot] = 0, False
        self.version[slot] += 1
        self._dirty = True

    def flush(self) -> None:
        """Bring the device's tables up to date; free when nothing changed."""
        if not self._dirty:
            return
        self.table.copy_(self._staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._dirty = False
