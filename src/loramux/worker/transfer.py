"""Values on their way between host and device, without one waiting for the other.

On CUDA the host's side of a copy is pinned memory; without that a copy that should not wait would.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16
"""Bytes: a part begins where numbers of any type may."""


def upload(
    values: Sequence[int] | Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The values on the device, in the order of what was launched there before."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Flat arrays on the device, as ``upload`` brings them, by one copy for all."""
    *starts, total = accumulate((-(-a.nbytes // _ALIGN) * _ALIGN for a in arrays), initial=0)
    block = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=True):
        block[start : start + array.nbytes].numpy()[:] = array.view(np.uint8)
    arrived = block.to(device, non_blocking=True)
    return [
        arrived[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for start, array in zip(starts, arrays, strict=True)
    ]


class Download:
    """Copies of device tensors that arrive on the host when the device has computed them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [_to_host(tensor) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


class Rows:
    """Some rows of a batch, known on the host, in ascending order."""

    def __init__(self, rows: Sequence[int], num_rows: int, device: torch.device) -> None:
        # To take all rows costs nothing, and it is the common case: batches are often uniform.
        self._index = None if len(rows) == num_rows else upload(rows, torch.int64, device)

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of ``tensor``: the tensor itself if they are all, else a copy."""
        return tensor if self._index is None else tensor.index_select(0, self._index)

    def replace(self, tensor: Tensor, values: Tensor) -> None:
        """Write ``values`` to these rows of ``tensor``."""
        if self._index is None:
            tensor.copy_(values)
        else:
            tensor.index_copy_(0, self._index, values)


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
