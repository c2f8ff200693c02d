"""Host arrays to fixed device buffers, while the device is busy with the step before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ROTATION = 3
"""Pinned blocks: one per step that may be under way, and one that is being filled."""
_FIRST_BYTES = 1 << 20
_ALIGN = 16
_CHUNK_BYTES = 4096
"""What one program of the kernel moves."""


class Uploads:
    """What a step needs on the device, brought there by one copy.

    ``copy`` writes to a pinned block, ``flush`` sends the block and lets a kernel put each part to
    its place: a dozen small copies would cost more on either side. The host waits for nothing; a
    pinned block is written again when the step before the last one is done with it. On a CPU
    ``copy`` copies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._blocks = [_Block(_FIRST_BYTES, device) for _ in range(_ROTATION * self._on_gpu)]
        self._current = 0
        self._used = 0
        self._parts: list[tuple[int, int, int]] = []
        """Address on the device, first byte in the block and bytes of each part."""

    def begin_step(self) -> None:
        """Go on to the next block. Parts that were not flushed are dropped."""
        self._used = 0
        self._parts.clear()
        if self._on_gpu:
            self._current = (self._current + 1) % _ROTATION
            self._blocks[self._current].wait()

    def stage(self, values: np.ndarray) -> Tensor:
        """A pinned copy, good until the step after the next one."""
        tensor = torch.from_numpy(values)
        if not self._on_gpu:
            return tensor
        start = self._reserve(values.nbytes)
        block = self._blocks[self._current].host
        staged = block[start : start + values.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        return staged

    def copy(self, target: Tensor, values: np.ndarray) -> None:
        """Fill the beginning of ``target``, a contiguous tensor of the same dtype.

        Both have elements of 4 or 8 bytes. On CUDA it is there after ``flush``.
        """
        assert target.element_size() == values.itemsize, "source and target differ in dtype"
        assert values.size <= target.numel(), "the values do not fit into their buffer"
        if not self._on_gpu:
            target.view(-1)[: values.size].copy_(torch.from_numpy(values).view(-1))
            return
        start = self._reserve(values.nbytes)
        host = self._blocks[self._current].array
        host[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self._parts.append((target.data_ptr(), start, values.nbytes))

    def flush(self) -> None:
        """Send what was copied since ``begin_step``."""
        if not self._parts:
            return
        from loramux.ops.triton_upload import place_chunks

        chunks = [
            (target + done, start + done, min(num_bytes - done, _CHUNK_BYTES))
            for target, start, num_bytes in self._parts
            for done in range(0, num_bytes, _CHUNK_BYTES)
        ]
        self._parts.clear()
        header = np.array(chunks, dtype=np.int64)
        start = self._reserve(header.nbytes)
        block = self._blocks[self._current]
        block.array[start : start + header.nbytes] = header.view(np.uint8).ravel()
        block.send(self._used)
        chunk_table = block.device[start : start + header.nbytes].view(torch.int64)
        place_chunks(block.device, chunk_table.view(-1, 3), _CHUNK_BYTES)
        block.sent()

    def _reserve(self, num_bytes: int) -> int:
        """Room in the current block; its first byte."""
        start = self._used
        self._used = -(-(start + num_bytes) // _ALIGN) * _ALIGN
        block = self._blocks[self._current]
        if self._used > block.host.numel():
            # What was staged before is kept alive by whoever has it.
            larger = _Block(2 * self._used, self._device)
            larger.array[:start] = block.array[:start]
            self._blocks[self._current] = larger
        return start


class _Block:
    """Pinned memory and its image on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.array = self.host.numpy()
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._done = torch.cuda.Event()

    def wait(self) -> None:
        """Until the device is done with it."""
        self._done.synchronize()

    def send(self, num_bytes: int) -> None:
        self.device[:num_bytes].copy_(self.host[:num_bytes], non_blocking=True)

    def sent(self) -> None:
        self._done.record()
