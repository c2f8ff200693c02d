"""The slot tables: for each module and slot, where A, B and g stand and what the rank is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loramux.lora.weights import Placement
from loramux.types import Slot


class SlotTables:
    """Tables ``[modules, slots + 1]``, the last column being the base model: rank 0 everywhere.

    ``offset_a``, ``offset_b`` and ``offset_g`` are int64, in units of 16 bytes from the arena's
    start; ``rank`` is int32; ``has_gain`` is bool. Rank 0 means "no weights here" and is never
    dereferenced. Changes are made to the host's tables; ``flush`` copies them to the device's.
    """

    def __init__(self, num_modules: int, num_slots: int, device: torch.device) -> None:
        shape = (num_modules, num_slots + 1)
        self.num_slots = num_slots
        self.host_offset_a = np.zeros(shape, dtype=np.int64)
        self.host_offset_b = np.zeros(shape, dtype=np.int64)
        self.host_offset_g = np.zeros(shape, dtype=np.int64)
        self.host_rank = np.zeros(shape, dtype=np.int32)
        self.host_has_gain = np.zeros(shape, dtype=np.bool_)
        self.offset_a = torch.from_numpy(self.host_offset_a).to(device, copy=True)
        self.offset_b = torch.from_numpy(self.host_offset_b).to(device, copy=True)
        self.offset_g = torch.from_numpy(self.host_offset_g).to(device, copy=True)
        self.rank = torch.from_numpy(self.host_rank).to(device, copy=True)
        self.has_gain = torch.from_numpy(self.host_has_gain).to(device, copy=True)
        self.version = [0] * (num_slots + 1)
        """Grows with every change of a slot's column, so that what was derived from it can tell."""
        self._dirty = False

    def set(self, slot: Slot, placements: Sequence[Placement], start: int) -> None:
        """Write a column; ``start`` is the block's first unit in the arena."""
        self.clear(slot)
        assert 0 <= start <= np.iinfo(np.int64).max // 2, "an offset would not fit into int64"
        for p in placements:
            self.host_offset_a[p.module, slot] = start + p.offset_a
            self.host_offset_b[p.module, slot] = start + p.offset_b
            self.host_offset_g[p.module, slot] = start + p.offset_g if p.has_gain else 0
            self.host_rank[p.module, slot] = p.rank
            self.host_has_gain[p.module, slot] = p.has_gain

    def clear(self, slot: Slot) -> None:
        """Make a column that of the base model."""
        assert slot != self.num_slots, "the base model's column is fixed"
        for table in (self.host_offset_a, self.host_offset_b, self.host_offset_g):
            table[:, slot] = 0
        self.host_rank[:, slot] = 0
        self.host_has_gain[:, slot] = False
        self.version[slot] += 1
        self._dirty = True

    def flush(self) -> None:
        """Bring the device's tables up to date; free when nothing changed."""
        if not self._dirty:
            return
        for device, host in (
            (self.offset_a, self.host_offset_a),
            (self.offset_b, self.host_offset_b),
            (self.offset_g, self.host_offset_g),
            (self.rank, self.host_rank),
            (self.has_gain, self.host_has_gain),
        ):
            device.copy_(torch.from_numpy(host))
        self._dirty = False
