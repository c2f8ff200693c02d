"""Lanes whose work is carried out piece by piece, in any order that their waits allow."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from loramux.lora.lanes import Mark


@dataclass(frozen=True)
class SlowMark:
    lane: SlowLane
    place: int

    def query(self) -> bool:
        return self.lane.num_done >= self.place


class SlowLane:
    """Does nothing until it is told to go on."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], object] | SlowMark] = deque()
        self.num_done = 0
        self.waits: list[SlowMark] = []
        """Every mark of another lane that this one was told to wait for."""

    def ask(self, work: Callable[[], object] | SlowMark) -> None:
        self._todo.append(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """In two pieces; a device does not keep the host's memory alive."""
        half, start = len(source) // 2, source.storage_offset()
        held = weakref.ref(source if source._base is None else source._base)

        def copy_part(part: slice) -> None:
            memory = held()
            assert memory is not None, "host memory was freed before it had been copied"
            target[part].copy_(memory[start : start + len(target)][part])

        self.ask(lambda: copy_part(slice(half)))
        self.ask(lambda: copy_part(slice(half, None)))

    def move(self, target: Tensor, source: Tensor) -> None:
        self.ask(lambda: target.copy_(source.clone()))

    def mark(self) -> SlowMark:
        return SlowMark(self, self.num_done + len(self._todo))

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, SlowMark)
        assert mark.lane is not self
        self.waits.append(mark)
        self.ask(mark)

    def go_on(self) -> bool:
        """Do the next piece of work; False when there is none or it must wait."""
        if not self._todo:
            return False
        work = self._todo[0]
        if isinstance(work, SlowMark):
            if not work.query():
                return False
        else:
            work()
        self._todo.popleft()
        self.num_done += 1
        return True


def finish(*lanes: SlowLane) -> None:
    """Let lanes do all they have to do."""
    while any([lane.go_on() for lane in lanes]):
        pass
    assert not any(lane._todo for lane in lanes), "lanes wait for each other"
