"""Which copies into the arena are under way, and who must wait for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from loramux.lora.host_memory import HostBlock
from loramux.lora.lanes import Lane, Mark
from loramux.types import Slot


@dataclass(frozen=True, slots=True)
class _Copy:
    source: HostBlock
    """Held until the copy has ended, though its adapter be dropped before."""
    end: Mark


@dataclass(frozen=True, slots=True)
class _Left:
    """Elements ``start … end - 1`` of the arena: a slot has left them, a step may still read."""

    start: int
    end: int
    last_read: Mark


class Transfers:
    """Orders copies on their own lane after and before the steps that touch the same weights.

    A step waits for the copies of its own slots, no others; a copy waits for the last step that
    may read what it overwrites. Only to move blocks, which is rare, all waits for all.
    """

    def __init__(self, steps: Lane, copies: Lane) -> None:
        self._steps = steps
        self._copies = copies
        self._under_way: deque[_Copy] = deque()
        self._arriving: dict[Slot, Mark] = {}
        """By slot, the end of a copy that no step has waited for yet."""
        self._last_read: dict[Slot, Mark] = {}
        """By slot, the end of the last step that reads it."""
        self._left: list[_Left] = []

    @contextmanager
    def step(self, slots: Collection[Slot]) -> Iterator[None]:
        """The step that is launched inside reads these slots."""
        self._forget_what_is_over()
        for slot in slots:
            arriving = self._arriving.pop(slot, None)
            if arriving is not None:
                self._steps.wait_for(arriving)
        yield
        if slots:
            end = self._steps.mark()
            self._last_read.update(dict.fromkeys(slots, end))

    def load(self, slot: Slot, arena: Tensor, start: int, block: HostBlock) -> None:
        """Start to copy a slot's block to elements ``start …`` of the arena."""
        end = start + block.num_elements
        self._forget_what_is_over()
        for left in self._left:
            if left.start < end and start < left.end:
                self._copies.wait_for(left.last_read)
        for piece in block.pieces:
            self._copies.copy(arena[start : start + piece.numel()], piece)
            start += piece.numel()
        copy = _Copy(block, self._copies.mark())
        self._under_way.append(copy)
        self._arriving[slot] = copy.end

    def leave(self, slot: Slot, start: int, length: int) -> None:
        """A slot's block is given up, which a launched step may still read."""
        self._arriving.pop(slot, None)
        last_read = self._last_read.pop(slot, None)
        if last_read is not None:
            self._left.append(_Left(start, start + length, last_read))

    @contextmanager
    def moves(self) -> Iterator[Lane]:
        """The lane on which blocks may be moved: after all that runs, before all that comes."""
        if self._under_way:  # also those whose slot has been cleared: they still write
            self._steps.wait_for(self._under_way[-1].end)
        yield self._steps
        self._copies.wait_for(self._steps.mark())
        self._last_read.clear()
        self._left.clear()

    def _forget_what_is_over(self) -> None:
        while self._under_way and self._under_way[0].end.query():
            self._under_way.popleft()
        self._left = [left for left in self._left if not left.last_read.query()]
