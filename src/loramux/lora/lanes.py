"""Work for a device in lanes: in order within one, side by side between them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a lane's work."""

    def query(self) -> bool:
        """Whether the lane has come past it."""
        ...


class Lane(Protocol):
    """Nothing here waits for the device; what is asked for is put behind what was before."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy; the source must stay until the lane has come past it."""
        ...

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy within one tensor; the two may overlap."""
        ...

    def mark(self) -> Mark:
        """The end of what has been asked for so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Begin what is asked for from now on only when another lane is past a mark of its."""
        ...


class DirectLane:
    """Does at once what it is asked for, as a CPU does."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def move(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source.clone())

    def mark(self) -> Mark:
        return _Done()

    def wait_for(self, mark: Mark) -> None:
        assert mark.query(), "what is done at once cannot wait"


class CudaLane:
    """A stream; None is the one that is current when something is asked for."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    def current(self) -> AbstractContextManager[object]:
        """Inside, the lane's stream is the current one."""
        return torch.cuda.stream(self._stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self.current():
            target.copy_(source, non_blocking=True)

    def move(self, target: Tensor, source: Tensor) -> None:
        with self.current():
            target.copy_(source.clone())

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        (self._stream or torch.cuda.current_stream()).wait_event(mark)


class _Done:
    def query(self) -> bool:
        return True


def lanes_of(device: torch.device) -> tuple[Lane, Lane]:
    """The lane of a device's steps, and one for copies beside them."""
    if device.type == "cuda":
        return CudaLane(), CudaLane(torch.cuda.Stream(device))
    return DirectLane(), DirectLane()
