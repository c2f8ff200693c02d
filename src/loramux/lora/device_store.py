"""The device tier: one arena at a fixed address, and which part of it each slot's adapter has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loramux.lora.host_memory import HostBlock
from loramux.lora.transfers import Transfers
from loramux.ops.layout import ALIGN_BYTES
from loramux.types import Slot


@dataclass(slots=True)
class _Extent:
    start: int
    length: int


class DeviceStore:
    """Blocks of adapter weights in one allocation; starts and lengths count in elements.

    The caller keeps the sum of all blocks within ``num_elements``. When a block fits only after
    the free room is brought together, the others are moved: ``load`` says which slots did.
    """

    def __init__(
        self, num_bytes: int, dtype: torch.dtype, device: torch.device, transfers: Transfers
    ) -> None:
        unit = ALIGN_BYTES // dtype.itemsize
        self.unit = unit
        """Elements in one unit of the tables' offsets."""
        num_elements = -(-num_bytes // dtype.itemsize // unit) * unit
        self.arena = torch.empty(num_elements, dtype=dtype, device=device)
        assert self.arena.data_ptr() % ALIGN_BYTES == 0
        self._extents: dict[Slot, _Extent] = {}
        self._transfers = transfers

    @property
    def used_bytes(self) -> int:
        return sum(e.length for e in self._extents.values()) * self.arena.element_size()

    def start_of(self, slot: Slot) -> int:
        """First element of a slot's block."""
        return self._extents[slot].start

    def load(self, slot: Slot, block: HostBlock) -> list[Slot]:
        """Start to copy a host block in; the slots whose blocks had to move, mostly none."""
        assert slot not in self._extents, "a slot must be cleared before it is filled"
        length = block.num_elements
        assert length > 0, "an adapter has weights"
        moved: list[Slot] = []
        start = self._find_room(length)
        if start is None:
            moved = self._compact()
            start = self._find_room(length)
        assert start is not None, "the residency let more bytes in than the arena has"
        self._transfers.load(slot, self.arena, start, block)
        self._extents[slot] = _Extent(start, length)
        return moved

    def clear(self, slot: Slot) -> None:
        """Free a slot's block."""
        extent = self._extents.pop(slot)
        self._transfers.leave(slot, extent.start, extent.length)

    def check(self) -> None:
        """Assert that blocks are aligned, inside the arena and apart."""
        end = 0
        for extent in self._in_order():
            assert extent.start >= end, "two blocks overlap"
            assert extent.start % self.unit == 0
            end = extent.start + extent.length
        assert end <= self.arena.numel()

    def _find_room(self, length: int) -> int | None:
        """Start of room for a block: such that no step reads, so that its copy need not wait; else
        the first that is long enough."""
        gaps = [(start, end) for start, end in self._gaps() if end - start >= length]
        if not gaps:
            return None
        unread = self._transfers.unread(gaps, length)
        return gaps[0][0] if unread is None else unread

    def _gaps(self) -> Iterator[tuple[int, int]]:
        cursor = 0
        for extent in self._in_order():
            yield cursor, extent.start
            cursor = extent.start + extent.length
        yield cursor, self.arena.numel()

    def _compact(self) -> list[Slot]:
        """Move every block as far to the front as it goes."""
        cursor = 0
        moved: list[Slot] = []
        with self._transfers.moves() as lane:
            for slot, extent in sorted(self._extents.items(), key=lambda item: item[1].start):
                if extent.start != cursor:
                    source = self.arena[extent.start : extent.start + extent.length]
                    lane.move(self.arena[cursor : cursor + extent.length], source)
                    extent.start = cursor
                    moved.append(slot)
                cursor += extent.length
        return moved

    def _in_order(self) -> list[_Extent]:
        return sorted(self._extents.values(), key=lambda extent: extent.start)
