"""The slot tables: for each module and slot, where A, B and g stand and what the rank is."""

from __future__ import annotations

import numpy as np
import torch

from loramux.lora.placements import Placements
from loramux.ops.layout import RECORD
from loramux.types import Slot


class SlotTables:
    """One record (see ``ops/layout.py``) for each module and slot, the last slot being the base's.

    ``table`` ``[modules, slots + 1, 4]`` int64 is the device's, ``host`` the same as a numpy array.
    Rank 0 means "no weights here" and is never dereferenced. Changes are made to the host's;
    ``flush`` copies the columns that changed.
    """

    def __init__(self, num_modules: int, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        columns = torch.zeros(num_slots + 1, num_modules, RECORD, dtype=torch.int64)
        self.table = torch.zeros(
            num_modules, num_slots + 1, RECORD, dtype=torch.int64, device=device
        )
        # On the host each slot's column is in one piece, so that it can be copied alone: with the
        # modules of experts the table has some 20 MB, and a column half a MB.
        self._columns = columns.pin_memory() if device.type == "cuda" else columns
        self.host = self._columns.numpy().transpose(1, 0, 2)
        self.version = [0] * (num_slots + 1)
        """Grows with every change of a slot's column, so that what was derived from it can tell."""
        self.max_rank = [0] * (num_slots + 1)
        """Largest rank of each slot's adapter."""
        self.has_gain = [False] * (num_slots + 1)
        """Whether each slot's adapter has DoRA anywhere."""
        self._changed: set[Slot] = set()
        self._copied: dict[Slot, torch.cuda.Event] = {}
        """By slot, the end of the last copy of its column to a GPU."""

    def set(self, slot: Slot, placements: Placements, start: int) -> None:
        """Write a column; ``start`` is the block's first unit in the arena."""
        self.clear(slot)
        assert 0 <= start <= np.iinfo(np.int64).max // 2, "an offset would not fit into int64"
        self.host[placements.modules, slot] = placements.records_from(start)
        self.max_rank[slot] = placements.max_rank
        self.has_gain[slot] = placements.has_gain

    def clear(self, slot: Slot) -> None:
        """Make a column that of the base model."""
        assert slot != self.num_slots, "the base model's column is fixed"
        if slot in self._copied:
            self._copied.pop(slot).synchronize()  # the last flush may still be reading
        self.host[:, slot] = 0
        self.max_rank[slot], self.has_gain[slot] = 0, False
        self.version[slot] += 1
        self._changed.add(slot)

    def flush(self) -> None:
        """Bring the device's tables up to date, behind what it does already.

        Two launches for each column that changed: one over the bus, one to its place.
        """
        on_gpu = self.table.device.type == "cuda"
        for slot in self._changed:
            column = self._columns[slot].to(self.table.device, non_blocking=True)
            self.table[:, slot] = column
            if on_gpu:
                self._copied[slot] = torch.cuda.Event()
                self._copied[slot].record()
        self._changed.clear()
