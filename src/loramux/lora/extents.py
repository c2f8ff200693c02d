"""Which parts of a stretch of memory are free. Pure bookkeeping: numbers, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """``length`` units from ``start`` on."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Extents:
    """Gives out parts of ``0 … size - 1``, several for one request where no single one is left.

    So whatever is free can be used, and nothing ever has to be moved.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [Extent(0, size)] if size else []  # in order, no two side by side

    @property
    def num_free(self) -> int:
        return sum(extent.length for extent in self._free)

    def take(self, length: int) -> list[Extent] | None:
        """Parts of so many units together, as few as possible; None if fewer are free."""
        assert length > 0
        if length > self.num_free:
            return None
        fitting = [extent for extent in self._free if extent.length >= length]
        if fitting:
            return [self._cut(min(fitting, key=_length), length)]
        taken: list[Extent] = []
        for extent in sorted(self._free, key=_length, reverse=True):
            taken.append(self._cut(extent, min(extent.length, length)))
            length -= taken[-1].length
            if not length:
                break
        return taken

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Parts that ``take`` has given out, each once."""
        for extent in extents:
            at = bisect_left(self._free, extent)
            start, end = extent.start, extent.end
            if at < len(self._free) and self._free[at].start == end:
                end = self._free.pop(at).end
            if at and self._free[at - 1].end == start:
                start = self._free.pop(at - 1).start
            insort(self._free, Extent(start, end - start))

    def check(self) -> None:
        """Assert that free parts are in order, inside and apart."""
        end = -1
        for extent in self._free:
            assert extent.length > 0
            assert extent.start > end, "two free parts overlap, or should be one"
            end = extent.end
        assert end <= self.size

    def _cut(self, extent: Extent, length: int) -> Extent:
        """The first units of a free part."""
        self._free.remove(extent)
        if extent.length > length:
            insort(self._free, Extent(extent.start + length, extent.length - length))
        return Extent(extent.start, length)


def _length(extent: Extent) -> int:
    return extent.length
