"""Values go to a device in one piece and arrive as what they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loramux.worker.transfer import upload_all


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_arrays_of_several_types_arrive_as_they_are(device: torch.device) -> None:
    arrays = [
        np.arange(5, dtype=np.int64) - 2**60,
        np.zeros(0, dtype=np.float32),
        np.linspace(0, 1, 3, dtype=np.float32),
        np.arange(7, dtype=np.int32),
        np.array([np.nan, -0.0, 1e300]),
    ]
    arrived = upload_all(arrays, device)
    assert [t.device.type for t in arrived] == [device.type] * 5
    for tensor, array in zip(arrived, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.cpu().numpy().tobytes() == array.tobytes()


def test_nothing_to_send_is_nothing_that_arrives(device: torch.device) -> None:
    assert upload_all([], device) == []
