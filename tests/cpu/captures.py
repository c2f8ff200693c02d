"""Captured steps without a GPU: a graph computes again what was captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loramux.worker import graphs


class Again:
    """Instead of a CUDA graph."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


def capture_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, whose layers are compiled anew."""
    for name, result in {
        "graph_pool_handle": None,
        "Stream": None,
        "synchronize": None,
        "mem_get_info": (2**30, 2**31),
        "memory_reserved": 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
    monkeypatch.setattr(graphs, "rehearse", lambda run, stream: run())
    monkeypatch.setattr(graphs, "capture", lambda run, stream, pool: Again(run))
    torch._dynamo.reset()
