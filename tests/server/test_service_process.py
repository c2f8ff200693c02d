"""An engine in a process of its own, over a fake worker."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loramux.config import EngineOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.interface import Service
from loramux.engine.service_process import ServiceProcess
from loramux.errors import (
    AdapterSourceNotFound,
    EngineStopped,
    InvalidRequest,
    ModelNotServable,
    UnknownModel,
)
from loramux.guide import Guide
from loramux.testing import expected_embedding, expected_tokens
from loramux.types import (
    Delta,
    EmbeddingRequest,
    GenerationRequest,
    PoolingParams,
    SamplingParams,
    numbers_of,
)
from tests.server.fake_service import build_service, with_settings_kept, with_slow_guides

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

PROMPT = [1, 2, 3]


def build(adapters: dict[str, str] | None = None) -> Callable[[], Service]:
    return partial(build_service, "base", EngineOptions(), adapters or {})


class Running:
    def __init__(self, build: Callable[[], Service]) -> None:
        self.service = ServiceProcess(build)
        self.engine = AsyncEngine(self.service)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.service._process is not None
        return self.service._process

    async def ask(self, model: str | None = None, **params: Any) -> list[Delta]:
        request = GenerationRequest(
            prompt_token_ids=PROMPT,
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params}),
            model=model,
        )
        return [delta async for delta in await self.engine.submit(request)]

    async def until(self, holds: Callable[[Any], bool]) -> None:
        """Wait for statistics of which ``holds`` is true."""
        while not holds(await self.engine.stats()):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(build: Callable[[], Service]) -> AsyncIterator[Running]:
    bench = Running(build)
    await bench.engine.start()
    try:
        yield bench
    finally:
        await bench.engine.stop()
        assert bench.process.returncode is not None


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_answers_are_those_of_an_engine_in_this_process(tmp_path: Path) -> None:
    async with running(build({"a": str(tmp_path)})) as bench:
        assert (bench.engine.base_name, bench.engine.max_model_len) == ("base", 100)
        [info] = await bench.engine.adapters()
        base, adapted = await asyncio.gather(bench.ask(), bench.ask("a", n=2, seed=4))
        assert tokens(base) == expected_tokens(None, PROMPT, 4)
        assert tokens([d for d in adapted if d.index == 0]) == expected_tokens(
            info.adapter_id, PROMPT, 4
        )
        assert (await bench.engine.stats()).requests_finished == 3
    assert bench.process.returncode == 0


async def test_embeddings_come_over_the_process(tmp_path: Path) -> None:
    async with running(build({"a": str(tmp_path)})) as bench:
        [info] = await bench.engine.adapters()
        params = PoolingParams(pooling="mean", normalize=False)
        request = EmbeddingRequest(prompt_token_ids=PROMPT, params=params, model="a", priority=3)
        [delta] = [delta async for delta in await bench.engine.submit(request)]
        assert delta.finish_reason == "stop"
        assert delta.embedding is not None
        expected = expected_embedding(info.adapter_id, PROMPT, pooling="mean", normalize=False)
        assert numbers_of(delta.embedding) == pytest.approx(expected, rel=1e-6)


async def test_adapters_come_and_go(tmp_path: Path) -> None:
    async with running(build()) as bench:
        loaded = await bench.engine.load_adapter("a", str(tmp_path), pinned=True)
        assert await bench.engine.adapters() == [loaded]
        assert not (await bench.engine.pin_adapter("a", pinned=False)).pinned
        await bench.engine.unload_adapter("a")
        assert await bench.engine.adapters() == []


async def test_errors_are_those_of_an_engine_in_this_process(tmp_path: Path) -> None:
    async with running(build()) as bench:
        with pytest.raises(UnknownModel):
            await bench.ask("nobody")
        with pytest.raises(InvalidRequest) as refused:
            await bench.ask(max_tokens=1000)
        assert refused.value.param == "max_tokens"
        with pytest.raises(AdapterSourceNotFound, match="no such"):
            await bench.engine.load_adapter("a", str(tmp_path / "missing"))
        assert tokens(await bench.ask()) == expected_tokens(None, PROMPT, 4)


async def test_a_codec_travels_once() -> None:
    async with running(build()) as bench:
        codec = await bench.engine.text_of(None)
        assert codec.encode("ab") == [97, 98]
        assert await bench.engine.text_of(None) is codec
        with pytest.raises(UnknownModel):
            await bench.engine.text_of("nobody")


async def test_a_process_that_is_killed_ends_what_waits_for_it() -> None:
    async with running(build()) as bench:
        stats = await bench.engine.stats()
        asking = asyncio.create_task(bench.ask(max_tokens=90, ignore_eos=True))
        await bench.until(lambda stats: stats.num_running == 1)
        bench.process.kill()
        last = (await asking)[-1]
        assert last.finish_reason == "error"
        assert "SIGKILL, which the system sends when memory is short" in (last.error or "")
        assert bench.engine.failure == last.error
        with pytest.raises(EngineStopped, match="restart the server"):
            await bench.ask()
        with pytest.raises(EngineStopped):
            await bench.engine.text_of(None)
        assert (await bench.engine.stats()).num_steps >= stats.num_steps
        assert await bench.engine.adapters() == []


async def test_stop_aborts_what_runs() -> None:
    async with running(build()) as bench:
        asking = asyncio.create_task(bench.ask(max_tokens=90, ignore_eos=True))
        await bench.until(lambda stats: stats.num_running == 1)
        await bench.engine.stop()
        assert (await asking)[-1].finish_reason == "abort"
        assert bench.process.returncode == 0


async def test_signals_of_the_terminal_are_left_to_the_parent() -> None:
    async with running(build()) as bench:
        for number in (signal.SIGINT, signal.SIGTERM):
            bench.process.send_signal(number)
        assert tokens(await bench.ask()) == expected_tokens(None, PROMPT, 4)


async def test_who_gives_up_while_a_guide_is_compiled_leaves_nothing_behind() -> None:
    async with running(partial(with_slow_guides, build())) as bench:
        asking = asyncio.create_task(bench.ask(guide=Guide.regex("A")))
        await asyncio.sleep(0.1)  # a guide takes longer, by far
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.6)
        stats = await bench.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.prompt_tokens) == (0, 0, 0)


async def test_no_thread_of_the_process_keeps_the_steps_waiting_for_long(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    async with running(partial(with_settings_kept, build(), file)):
        interval, new_objects, frozen = json.loads(file.read_text())
    assert interval < sys.getswitchinterval() / 2
    assert new_objects > gc.get_threshold()[0]
    assert frozen > 10_000


def refuse(error: Exception) -> Service:
    raise error


async def test_a_refusal_to_start_is_the_callers() -> None:
    engine = AsyncEngine(ServiceProcess(partial(refuse, ModelNotServable("m", "it is a toy"))))
    with pytest.raises(ModelNotServable, match="cannot serve m: it is a toy") as refused:
        await engine.start()
    assert refused.value.reason == "it is a toy"


async def test_an_adapter_that_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    engine = AsyncEngine(ServiceProcess(build({"a": str(tmp_path / "missing")})))
    with pytest.raises(AdapterSourceNotFound):
        await engine.start()


async def test_a_fault_while_it_is_built_says_where_to_look() -> None:
    engine = AsyncEngine(ServiceProcess(partial(refuse, ValueError("secret"))))
    with pytest.raises(EngineStopped, match="exit status 1, see the log"):
        await engine.start()


PARENT = """
import asyncio
from functools import partial
from loramux.config import EngineOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.service_process import ServiceProcess
from tests.server.fake_service import build_service

async def main():
    service = ServiceProcess(partial(build_service, "base", EngineOptions(), {}))
    await AsyncEngine(service).start()
    print(service._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _lives(child):
        assert time.monotonic() < deadline, "it goes on without its parent"
        time.sleep(0.02)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text(encoding="ascii").rsplit(") ", 1)[1][0] != "Z"
