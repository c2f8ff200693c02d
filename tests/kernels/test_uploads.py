"""Uploads: what a step needs comes to its place, and not before it is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loramux.ops.triton_upload import place_chunks
from loramux.ops.upload import Uploads


def test_chunks_come_to_their_addresses(device: torch.device) -> None:
    block = torch.arange(256, dtype=torch.uint8, device=device)
    one = torch.zeros(5, dtype=torch.int32, device=device)
    two = torch.zeros(4, dtype=torch.int64, device=device)
    chunks = torch.tensor(
        [[one.data_ptr() + 4, 16, 12], [two.data_ptr(), 64, 16]], device=device, dtype=torch.int64
    )
    place_chunks(block, chunks, 64)
    words = block.view(torch.int32)
    assert one.tolist() == [0, *words[4:7].tolist(), 0]
    assert two[:2].tolist() == block[64:80].view(torch.int64).tolist()
    assert two[2:].tolist() == [0, 0]


def test_values_arrive(device: torch.device) -> None:
    uploads = Uploads(device)
    sizes = [1, 7, 1024, 3000, 0, 12345]
    targets = [
        torch.full((size + 3,), -1, dtype=dtype, device=device)
        for size in sizes
        for dtype in (torch.int32, torch.int64)
    ]
    for step in range(8):
        uploads.begin_step()
        wanted = [
            np.arange(step, step + len(t) - 3).astype(np.int32 if t.itemsize == 4 else np.int64)
            for t in targets
        ]
        for target, values in zip(targets, wanted, strict=True):
            uploads.copy(target, values)
        uploads.flush()
        for target, values in zip(targets, wanted, strict=True):
            assert target[: len(values)].tolist() == values.tolist()
            assert target[len(values) :].tolist() == [-1] * 3


def test_staged_values_stay_until_the_step_after_the_next(device: torch.device) -> None:
    uploads = Uploads(device)
    uploads.begin_step()
    first = uploads.stage(np.arange(50, dtype=np.int32))
    uploads.begin_step()
    second = uploads.stage(np.arange(50, 2_000_000, dtype=np.int32))  # needs a larger block
    assert first.tolist() == list(range(50))
    assert second[-1] == 1_999_999


def test_a_buffer_of_another_size_of_element_is_our_own_mistake(device: torch.device) -> None:
    uploads = Uploads(device)
    uploads.begin_step()
    with pytest.raises(AssertionError, match="differ in dtype"):
        uploads.copy(torch.zeros(4, dtype=torch.int64, device=device), np.zeros(4, np.int32))
    with pytest.raises(AssertionError, match="do not fit"):
        uploads.copy(torch.zeros(4, dtype=torch.int32, device=device), np.zeros(5, np.int32))
