"""Where adapters stand in host memory: anywhere, or for a GPU in memory that it reads by itself."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loramux.errors import ConfigError
from loramux.lora.extents import Extent, Extents

log = logging.getLogger(__name__)

_ALIGN_BYTES = 256


@dataclass(frozen=True, eq=False)
class HostBlock:
    """An adapter's weights, in pieces that belong one behind the other."""

    pieces: tuple[Tensor, ...]
    memory: object = None
    """What they are a part of, which must not go before them."""

    @property
    def num_elements(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def whole(self) -> Tensor:
        """All in one: itself if it is one piece, else a copy."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)

    def is_finite(self) -> bool:
        """Whether it has neither infinities nor NaN, in one pass and without a mask of its size."""
        return all(extreme.isfinite() for piece in self.pieces for extreme in piece.aminmax())


class HostMemory(Protocol):
    """Keeps blocks until nobody holds them any more. ``keep`` may be called in any thread."""

    def keep(self, block: HostBlock) -> HostBlock:
        """The same block where it is to stay. Raises ConfigError where there is no room for it."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is ready, after ``timeout`` seconds at the latest.

        Raises ConfigError where there cannot be so much.
        """
        ...


class OrdinaryMemory:
    """Leaves blocks where they are: what computes on a CPU reads them anywhere."""

    def keep(self, block: HostBlock) -> HostBlock:
        return block

    def wait(self, timeout: float | None = None) -> None:
        pass


class PinnedMemory:
    """Page-locked memory, all of it from the start on.

    To lock or unlock memory holds up whatever launches work on the GPU, for as long as a step and
    longer. So it is done once, and blocks come and go within. A block for which there is no room
    (while one is read that has no place in the budget yet) is locked by itself, and steps wait.
    """

    def __init__(self, num_bytes: int) -> None:
        """Begins to lock it, in a thread: that takes a second for 4 GiB."""
        self.num_bytes = -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._locked: _Locked | None = None
        self._problem: Exception | None = None
        self._extents = Extents(self.num_bytes)
        self._lock = threading.Lock()
        self._returned: deque[Sequence[Extent]] = deque()
        """Of blocks that nobody holds any more. Whoever drops one may hold any lock, so it is only
        noted here, which needs none."""
        self.num_beside = 0
        """Blocks that found no room."""
        self._locking = threading.Thread(target=self._lock_all, name="loramux-pin", daemon=True)
        self._locking.start()

    def wait(self, timeout: float | None = None) -> None:
        self._locking.join(timeout)
        if self._problem is not None:
            raise self._problem

    def _lock_all(self) -> None:
        try:
            self._locked = _Locked(self.num_bytes)
        except Exception as problem:  # for those who wait
            self._problem = problem

    def keep(self, block: HostBlock) -> HostBlock:
        self.wait()
        assert self._locked is not None
        extents = self._take(block.num_bytes)
        if extents is None:
            return self._keep_beside(block)
        source = block.whole.flatten().view(torch.uint8)
        pieces: list[Tensor] = []
        done = 0
        for extent in extents:
            part = source[done : done + extent.length]
            piece = self._locked.bytes[extent.start : extent.start + len(part)]
            piece.copy_(part)
            pieces.append(piece.view(block.pieces[0].dtype))
            done += len(part)
        kept = HostBlock(tuple(pieces), memory=self)
        weakref.finalize(kept, self._returned.append, extents).atexit = False
        return kept

    def check(self) -> None:
        """Assert that no part is lost or given out twice."""
        with self._lock:
            self._extents.check()

    @property
    def num_free(self) -> int:
        """Bytes for blocks that may come."""
        with self._lock:
            self._take_back()
            return self._extents.num_free

    def _take(self, num_bytes: int) -> list[Extent] | None:
        length = -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        with self._lock:
            self._take_back()
            return self._extents.take(length)

    def _take_back(self) -> None:
        while self._returned:
            self._extents.give_back(self._returned.popleft())

    def _keep_beside(self, block: HostBlock) -> HostBlock:
        source = block.whole.flatten()
        log.info("an adapter of %d bytes is locked beside the host cache", source.nbytes)
        with self._lock:
            self.num_beside += 1
        locked = _Locked(source.nbytes)
        piece = locked.bytes.view(source.dtype)
        piece.copy_(source)
        return HostBlock((piece,), memory=locked)


class _Locked:
    """Bytes that are page-locked for as long as it lives."""

    def __init__(self, num_bytes: int) -> None:
        """Raises ConfigError if so many cannot be locked."""
        try:
            pages = mmap.mmap(-1, max(num_bytes, 1))
        except OSError as error:
            raise ConfigError(
                f"{num_bytes:,} bytes of host memory for adapters cannot be had ({error}): start "
                "with a smaller --host-cache"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to find and lock
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
        self.bytes.zero_()  # by several threads, which find the pages faster than the driver does
        address = self.bytes.data_ptr()
        status = int(_runtime().cudaHostRegister(address, len(pages), 0))
        if status != 0:
            raise ConfigError(
                f"{num_bytes:,} bytes of host memory for adapters cannot be page-locked (CUDA "
                f"error {status}): start with a smaller --host-cache"
            )
        weakref.finalize(self, _unlock, pages, address).atexit = False


def _unlock(pages: mmap.mmap, address: int) -> None:
    """``pages`` are held until here."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()


def host_memory_for(device: torch.device, num_bytes: int) -> HostMemory:
    """For adapters of so many bytes together, on their way to a device."""
    return PinnedMemory(num_bytes) if device.type == "cuda" else OrdinaryMemory()
