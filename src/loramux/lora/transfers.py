"""Which copies into the arena are under way, and who must wait for whom."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from loramux.lora.host_memory import HostBlock
from loramux.lora.lanes import Lane, Mark
from loramux.plan import LOAD_BYTES
from loramux.types import Slot

_FIRST_PARTS, _MOST_PARTS = 4, 8
"""Of a large block, copied with one step: in the first portion that there is, and at most."""


@dataclass(slots=True)
class _Load:
    """A block that is not all asked for yet."""

    source: HostBlock
    parts: deque[Tensor]
    """What is left of it."""
    arena: Tensor
    start: int
    """Where the next part goes."""
    waits: list[Mark]
    """Ends of the steps that read what it overwrites."""


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

    A device's copies from the host follow each other in one queue, whatever their streams: what a
    step itself needs would stand behind a large block. So such a block is asked for in portions,
    one behind each step, until a step needs its slot. A portion is as large as was over in time
    before, when the next step was launched, and a little larger.
    """

    def __init__(self, steps: Lane, copies: Lane, load_bytes: int = LOAD_BYTES) -> None:
        """``load_bytes``: the most that is copied with one step that does not wait for it."""
        self._steps = steps
        self._copies = copies
        self._load_bytes = load_bytes
        self._part_bytes = load_bytes // _MOST_PARTS
        self._num_parts = _FIRST_PARTS
        """Of a portion."""
        self._portion_end: Mark | None = None
        self._to_come: dict[Slot, _Load] = {}
        """In the order in which they were ordered."""
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
        self._set_pace()
        while not self._to_come.keys().isdisjoint(slots):
            self._ask_for_first()
        for slot in slots:
            arriving = self._arriving.pop(slot, None)
            if arriving is not None:
                self._steps.wait_for(arriving)
        yield
        self._ask_for_portion()
        if slots:
            end = self._steps.mark()
            self._last_read.update(dict.fromkeys(slots, end))

    def has_arrived(self, slot: Slot) -> bool:
        """Whether a step with a slot would not have to wait."""
        end = self._arriving.get(slot)
        return slot not in self._to_come and (end is None or end.query())

    def unread(self, gaps: Iterable[tuple[int, int]], length: int) -> int | None:
        """Where in these free parts of the arena, each ``start … end - 1``, so many elements begin
        that no launched step reads."""
        self._forget_what_is_over()
        read = sorted((left.start, left.end) for left in self._left)
        for start, end in gaps:
            for read_start, read_end in read:
                if read_start < start + length and start < read_end:
                    start = read_end
            if start + length <= end:
                return start
        return None

    def load(self, slot: Slot, arena: Tensor, start: int, block: HostBlock) -> None:
        """Start to copy a slot's block to elements ``start …`` of the arena."""
        end = start + block.num_elements
        self._forget_what_is_over()
        waits = [left.last_read for left in self._left if left.start < end and start < left.end]
        length = max(1, self._part_bytes // arena.element_size())
        parts = deque(part for piece in block.pieces for part in piece.split(length))
        self._to_come[slot] = _Load(block, parts, arena, start, waits)
        if len(self._to_come) == 1 and block.num_bytes <= self._load_bytes:
            self._ask_for_first()

    def leave(self, slot: Slot, start: int, length: int) -> None:
        """A slot's block is given up, which a launched step may still read."""
        load = self._to_come.pop(slot, None)
        if load is not None:
            self._under_way.append(_Copy(load.source, self._copies.mark()))
        self._arriving.pop(slot, None)
        last_read = self._last_read.pop(slot, None)
        if last_read is not None:
            self._left.append(_Left(start, start + length, last_read))

    @contextmanager
    def moves(self) -> Iterator[Lane]:
        """The lane on which blocks may be moved: after all that runs, before all that comes."""
        while self._to_come:
            self._ask_for_first()
        if self._under_way:  # also those whose slot has been cleared: they still write
            self._steps.wait_for(self._under_way[-1].end)
        yield self._steps
        self._copies.wait_for(self._steps.mark())
        self._last_read.clear()
        self._left.clear()

    def _set_pace(self) -> None:
        """Now what the next step needs from the host would stand behind the last portion."""
        if self._portion_end is None:
            return
        in_time = self._portion_end.query()
        wanted = self._num_parts + 1 if in_time else self._num_parts // 2
        self._num_parts = min(max(wanted, 1), _MOST_PARTS)
        self._portion_end = None

    def _ask_for_portion(self) -> None:
        num_bytes = self._num_parts * self._part_bytes
        while self._to_come and num_bytes > 0:
            num_bytes -= self._ask_for_first(num_bytes)
            self._portion_end = self._copies.mark()

    def _ask_for_first(self, num_bytes: float = math.inf) -> int:
        """Ask for parts of the first load that is to come, until these have so many bytes or it has
        no more; how many they have."""
        slot, load = next(iter(self._to_come.items()))
        for mark in load.waits:
            self._copies.wait_for(mark)
        load.waits.clear()
        asked = 0
        while load.parts and asked < num_bytes:
            part = load.parts.popleft()
            end = load.start + part.numel()
            self._copies.copy(load.arena[load.start : end], part)
            load.start = end
            asked += part.nbytes
        if not load.parts:
            del self._to_come[slot]
            copy = _Copy(load.source, self._copies.mark())
            self._under_way.append(copy)
            self._arriving[slot] = copy.end
        return asked

    def _forget_what_is_over(self) -> None:
        while self._under_way and self._under_way[0].end.query():
            self._under_way.popleft()
        self._left = [left for left in self._left if not left.last_read.query()]
