"""Host arrays to fixed device buffers, while the device is busy with the step before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROTATION = 3
"""Pinned blocks: one per step that may be under way, and one that is being filled."""
_ALIGN = 16


class Uploads:
    """Copies that the host does not wait for.

    A copy from ordinary memory would make the host wait for the device, so values go through pinned
    blocks. A block is written again only when the copies out of it are done, which was two steps
    ago. On a CPU it is a plain copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._blocks = [torch.empty(0, dtype=torch.uint8)] * _ROTATION
        self._done: list[torch.cuda.Event | None] = [None] * _ROTATION
        self._current = 0
        self._used = 0
        self._needed = 1 << 20

    def begin_step(self) -> None:
        """Go on to the next block."""
        if not self._pinned:
            return
        event = torch.cuda.Event()
        event.record()
        self._done[self._current] = event
        self._current = (self._current + 1) % _ROTATION
        self._used = 0
        done = self._done[self._current]
        if done is not None:
            done.synchronize()
        if self._blocks[self._current].numel() < self._needed:
            self._blocks[self._current] = torch.empty(
                self._needed, dtype=torch.uint8, pin_memory=True
            )

    def stage(self, values: np.ndarray) -> Tensor:
        """A copy on the host that may be copied on to the device without waiting in this step."""
        tensor = torch.from_numpy(values)
        if not self._pinned:
            return tensor
        end = self._used + values.nbytes
        block = self._blocks[self._current]
        if end > block.numel():
            self._needed = max(self._needed, 2 * end)
            return tensor.pin_memory()  # this once; the next blocks are larger
        staged = block[self._used : end].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        self._used = -(-end // _ALIGN) * _ALIGN
        return staged

    def copy(self, target: Tensor, values: np.ndarray) -> None:
        """Fill the first rows of ``target``."""
        target[: len(values)].copy_(self.stage(values), non_blocking=True)
