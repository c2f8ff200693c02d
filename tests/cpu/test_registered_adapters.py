"""A registry under a real model: the same answers after a restart, and another base refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from loramux.adapters.registry import Registry
from loramux.engine.async_engine import AsyncEngine
from loramux.errors import RegistryUnusable
from loramux.testing import random_adapter, tiny_model
from loramux.types import GenerationRequest, SamplingParams
from tests.cpu.engines import assemble_tiny, async_engine
from tests.cpu.served import TARGETS

pytestmark = pytest.mark.anyio

NAMES = ("x0", "x1", "x2")


@asynccontextmanager
async def running(file: Path) -> AsyncIterator[AsyncEngine]:
    parts = assemble_tiny(tiny_model(), max_loras=2)
    registry = Registry(file)
    registry.bind(parts.base_shape)
    engine = async_engine(parts, registry=registry)
    await engine.start()
    yield engine
    await engine.stop()
    parts.core.check()


async def answers(engine: AsyncEngine, models: Sequence[str]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [
        GenerationRequest(prompt_token_ids=[5, 77, 31], params=params, model=model)
        for model in models
    ]
    streams = [await engine.submit(request) for request in requests]
    return [[t async for delta in stream for t in delta.token_ids] for stream in streams]


async def test_answers_after_a_restart_are_those_before(tmp_path: Path) -> None:
    layout = assemble_tiny(tiny_model()).worker.layout
    for seed, name in enumerate(NAMES):
        random_adapter(tmp_path / name, layout, rank=4, targets=TARGETS, seed=seed)
    async with running(tmp_path / "registry") as engine:
        for name in NAMES:
            await engine.load_adapter(name, str(tmp_path / name))
        expected = await answers(engine, NAMES)
    assert len({tuple(answer) for answer in expected}) == len(NAMES)
    async with running(tmp_path / "registry") as engine:
        assert [info.tier for info in await engine.adapters()] == ["source"] * 3
        assert await answers(engine, NAMES) == expected


def test_sizes_of_another_dtype_are_another_bases(tmp_path: Path) -> None:
    shapes = [assemble_tiny(tiny_model().to(dtype)).base_shape for dtype in DTYPES]
    assert assemble_tiny(tiny_model()).base_shape == shapes[0]
    registry = Registry(tmp_path / "registry")
    registry.bind(shapes[0])
    with pytest.raises(RegistryUnusable, match="bfloat16"):
        registry.bind(shapes[1])


DTYPES = (torch.float32, torch.bfloat16)
