"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
