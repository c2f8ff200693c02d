"""The engine's thread under an event loop, whether the engine runs ahead or not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loramux.adapters.spec import PreparedAdapter
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.service import EngineService
from loramux.engine.streams import EngineStream
from loramux.errors import (
    AdapterExists,
    AdapterRefused,
    AdapterSourceNotFound,
    EngineStopped,
    InvalidRequest,
    TooManyRequests,
    UnknownAdapter,
    UnknownModel,
)
from loramux.plan import StepPlan
from loramux.testing import FakeWorker, expected_tokens
from loramux.testing.worker import FakeLaunchedStep
from loramux.types import AdapterId, Delta, GenerationRequest, RequestId, SamplingParams
from tests.unit.small_engine import Outcome, SmallEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

PROMPT = [1, 2, 3, 4, 5]


class GatedWorker(FakeWorker):
    """Steps and reads wait while their gate is closed, and say that they have begun."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.step_gate, self.read_gate = threading.Event(), threading.Event()
        self.in_step, self.in_read = threading.Event(), threading.Event()
        self.step_gate.set()
        self.read_gate.set()

    def launch(self, plan: StepPlan) -> FakeLaunchedStep:
        self.in_step.set()
        assert self.step_gate.wait(10)
        return super().launch(plan)

    def read_adapter(self, name: str, directory: Path) -> PreparedAdapter:
        self.in_read.set()
        assert self.read_gate.wait(10)
        return super().read_adapter(name, directory)


class TimedWorker(GatedWorker):
    """Keeps a clock for each thread, on which a step takes 10 ms and a read 2 s."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._clock = threading.local()
        self.step_ends: list[float] = []

    def launch(self, plan: StepPlan) -> FakeLaunchedStep:
        launched = super().launch(plan)
        self.step_ends.append(self._after(0.01))
        return launched

    def read_adapter(self, name: str, directory: Path) -> PreparedAdapter:
        prepared = super().read_adapter(name, directory)
        self._after(2.0)
        return prepared

    def _after(self, seconds: float) -> float:
        self._clock.now = getattr(self._clock, "now", 0.0) + seconds
        return self._clock.now


class Bench:
    """An AsyncEngine and what lies under it."""

    def __init__(
        self,
        folder: Path,
        *,
        max_open: int = 100,
        at_start: Sequence[str] = (),
        runs_ahead: bool = False,
        worker_type: type[GatedWorker] = GatedWorker,
        **sizes: Any,
    ) -> None:
        self.small = SmallEngine(worker_type=worker_type, runs_ahead=runs_ahead, **sizes)
        assert isinstance(self.small.worker, GatedWorker)
        self.worker = self.small.worker
        self.folder = folder
        service = EngineService(
            self.small.core,
            self.worker,
            self.small.admission,
            self.small.languages,
            base_name="base",
            max_open=max_open,
            adapters=[(name, self.source(name)) for name in at_start],
        )
        self.engine = AsyncEngine(service)

    def source(self, name: str) -> str:
        directory = self.folder / name
        directory.mkdir(exist_ok=True)
        return str(directory)

    async def submit(
        self, model: str | None = None, *, request_id: str | None = None, **params: Any
    ) -> EngineStream:
        return await self.engine.submit(
            GenerationRequest(
                prompt_token_ids=PROMPT,
                params=SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params}),
                model=model,
                request_id=None if request_id is None else RequestId(request_id),
            )
        )

    async def hold_step(self) -> None:
        """Return when a step has begun that cannot go on before ``step_gate`` opens."""
        assert await asyncio.to_thread(self.worker.in_step.wait, 10)


Running = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """A started engine, by the options of ``Bench``; stopped at the end."""
    return partial(started, tmp_path, runs_ahead=request.param)


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    bench = Bench(folder, **options)
    await bench.engine.start()
    try:
        yield bench
    finally:
        bench.worker.step_gate.set()
        bench.worker.read_gate.set()
        await bench.engine.stop()
    if "failed" not in (bench.engine.failure or ""):
        bench.small.check_idle()


async def outcomes(stream: EngineStream, n: int = 1) -> list[Outcome]:
    collected = [Outcome() for _ in range(n)]
    async for delta in stream:
        assert delta.request_id == stream.request_id
        collected[delta.index].push(delta)
    assert all(outcome.finish_reason for outcome in collected)
    return collected


async def outcome(stream: EngineStream) -> Outcome:
    return (await outcomes(stream))[0]


def following(count: int, adapter_id: str | None = None) -> list[int]:
    return expected_tokens(adapter_id, PROMPT, count)


# Requests


async def test_a_stream_yields_the_answer(running: Running) -> None:
    async with running() as bench:
        done = await outcome(await bench.submit())
    assert (done.tokens, done.finish_reason) == (following(4), "length")


async def test_a_stream_yields_each_token_as_it_comes(running: Running) -> None:
    async with running() as bench:
        deltas: list[Delta] = [delta async for delta in await bench.submit()]
    assert [delta.token_ids for delta in deltas] == [(token,) for token in following(4)]


async def test_a_stream_yields_all_completions(running: Running) -> None:
    async with running() as bench:
        done = await outcomes(await bench.submit(n=3, temperature=1.0, seed=5), 3)
    assert [o.tokens for o in done] == [expected_tokens(None, PROMPT, 4, seed=s) for s in (5, 6, 7)]


async def test_many_streams_run_side_by_side(running: Running) -> None:
    models = [None, "a", "b", "c", "d"] * 8
    async with running(at_start="abcd") as bench:
        streams = [await bench.submit(model) for model in models]
        done = await asyncio.gather(*map(outcome, streams))
        assert (await bench.engine.stats()).max_step_adapters == 2
    assert [o.tokens for o in done] == [following(4, model) for model in models]


async def test_deltas_wait_for_a_late_reader(running: Running) -> None:
    async with running() as bench:
        early = await bench.submit()
        await outcome(await bench.submit(max_tokens=8))
        assert (await outcome(early)).tokens == following(4)


async def test_a_request_that_cannot_run_is_refused_at_once(running: Running) -> None:
    async with running() as bench:
        with pytest.raises(UnknownModel):
            await bench.submit("unknown")


async def test_too_many_requests_are_refused_until_one_ends(running: Running) -> None:
    async with running(max_open=2) as bench:
        streams = [await bench.submit(), await bench.submit()]
        with pytest.raises(TooManyRequests):
            await bench.submit()
        for stream in streams:
            await outcome(stream)
        await outcome(await bench.submit())


async def test_an_id_in_use_is_refused_until_its_request_ends(running: Running) -> None:
    async with running() as bench:
        first = await bench.submit(request_id="x")
        with pytest.raises(InvalidRequest, match="'x'") as refusal:
            await bench.submit(request_id="x")
        assert refusal.value.param == "request_id"
        assert (await outcome(first)).tokens == following(4)
        assert (await outcome(await bench.submit(request_id="x"))).tokens == following(4)


async def test_an_idle_engine_runs_no_steps(running: Running) -> None:
    async with running() as bench:
        await outcome(await bench.submit())
        calls = []
        step = bench.small.core.step
        bench.small.core.step = lambda: calls.append(1) or step()
        await asyncio.sleep(0.05)
        assert calls == []


# Aborts


async def test_an_abort_ends_the_stream(running: Running) -> None:
    async with running() as bench:
        bench.worker.step_gate.clear()
        stream = await bench.submit(max_tokens=20, n=2)
        await bench.hold_step()
        stream.abort()
        bench.worker.step_gate.set()
        done = await outcomes(stream, 2)
        assert [o.finish_reason for o in done] == ["abort", "abort"]
        assert done[0].tokens == following(1)


async def test_an_abort_before_the_first_step_ends_the_stream(running: Running) -> None:
    async with running() as bench:
        bench.worker.step_gate.clear()
        first = await bench.submit()
        await bench.hold_step()
        waiting = await bench.submit()
        waiting.abort()
        waiting.abort()
        bench.worker.step_gate.set()
        done = await outcome(waiting)
        assert (done.tokens, done.finish_reason) == ([], "abort")
        assert (await outcome(first)).tokens == following(4)


async def test_an_abort_after_the_end_does_nothing(running: Running) -> None:
    async with running() as bench:
        stream = await bench.submit()
        await outcome(stream)
        stream.abort()
        assert (await outcome(await bench.submit())).tokens == following(4)
        assert (await bench.engine.stats()).requests_aborted == 0


async def test_an_aborted_request_makes_room(running: Running) -> None:
    async with running(max_open=1) as bench:
        stream = await bench.submit(max_tokens=20)
        stream.abort()
        await outcome(stream)
        await outcome(await bench.submit())


# Adapters


async def test_adapters_named_at_start_are_loaded(running: Running) -> None:
    async with running(at_start="ab") as bench:
        assert [info.name for info in await bench.engine.adapters()] == ["a", "b"]


@pytest.mark.parametrize(("name", "error"), [("bad", AdapterRefused), ("base", AdapterExists)])
async def test_an_adapter_that_fails_at_start_stops_the_engine(
    tmp_path: Path, name: str, error: type[Exception]
) -> None:
    bench = Bench(tmp_path, at_start=["a", name])
    threads = set(threading.enumerate())
    with pytest.raises(error):
        await bench.engine.start()
    left = [t for t in set(threading.enumerate()) - threads if "loramux" in t.name]
    for thread in left:  # one that has handed over its result may take a moment to end
        thread.join(5)
    assert not [thread for thread in left if thread.is_alive()]
    with pytest.raises(EngineStopped):
        await bench.submit()


async def test_an_adapter_can_be_loaded_while_others_answer(running: Running) -> None:
    async with running(at_start="a") as bench:
        long = await bench.submit("a", max_tokens=20)
        info = await bench.engine.load_adapter("b", bench.source("b"), pinned=True)
        assert (info.name, info.pinned) == ("b", True)
        assert (await outcome(await bench.submit("b"))).tokens == following(4, "b")
        assert (await outcome(long)).tokens == following(20, "a")


async def test_an_adapter_can_be_unloaded_while_it_answers(running: Running) -> None:
    async with running(at_start="a") as bench:
        bench.worker.step_gate.clear()
        stream = await bench.submit("a")
        await bench.hold_step()
        unloading = asyncio.create_task(bench.engine.unload_adapter("a"))
        await asyncio.sleep(0)
        bench.worker.step_gate.set()
        await unloading
        with pytest.raises(UnknownModel):
            await bench.submit("a")
        assert (await outcome(stream)).tokens == following(4, "a")


async def test_an_adapter_can_be_replaced_while_it_answers(running: Running) -> None:
    async with running(at_start="a") as bench:
        old = await bench.submit("a", max_tokens=20)
        await bench.engine.load_adapter("a", bench.source("new"), load_inplace=True)
        new = await bench.submit("a")
        assert (await outcome(old)).tokens == following(20, "a")
        assert (await outcome(new)).tokens == following(4, "new")


async def test_reading_an_adapter_delays_no_step(running: Running) -> None:
    async with running() as bench:
        bench.worker.read_gate.clear()
        loading = asyncio.create_task(bench.engine.load_adapter("a", bench.source("a")))
        assert await asyncio.to_thread(bench.worker.in_read.wait, 10)
        assert (await outcome(await bench.submit())).tokens == following(4)
        assert not loading.done()
        bench.worker.read_gate.set()
        assert (await loading).name == "a"


async def test_no_step_waits_for_the_copy_that_another_request_needs(running: Running) -> None:
    """Of the four adapters three fit into host memory, and ``cold`` came first."""
    sizes: dict[str, Any] = {
        "num_slots": 3,
        "arena_bytes": 3,
        "host_bytes": 3,
        "num_blocks": 64,
        "max_num_seqs": 9,
        "max_step_tokens": 16,
    }
    at_start = ["cold", "a", "b", "idle"]
    async with running(worker_type=TimedWorker, at_start=at_start, **sizes) as bench:
        assert isinstance(bench.worker, TimedWorker)
        bench.worker.in_read.clear()
        bench.worker.read_gate.clear()
        bench.worker.step_gate.clear()
        streams = [await bench.submit(model, max_tokens=20) for model in "ab" * 4]
        await bench.hold_step()
        cold = await bench.submit("cold")
        bench.worker.step_gate.set()
        assert await asyncio.to_thread(bench.worker.in_read.wait, 10)
        done = await asyncio.gather(*map(outcome, streams))
        assert [o.tokens for o in done] == [following(20, model) for model in "ab" * 4]
        bench.worker.read_gate.set()
        # More steps, so that some come after the read as well.
        late = await bench.submit("a", max_tokens=25)
        assert (await outcome(cold)).tokens == following(4, "cold")
        await outcome(late)
        seconds = sorted(b - a for a, b in pairwise(bench.worker.step_ends))
    assert len(seconds) > 40
    assert seconds[-1] <= 1.5 * seconds[len(seconds) // 2]


async def test_of_two_loads_of_one_name_one_is_refused(running: Running) -> None:
    async with running() as bench:
        results = await asyncio.gather(
            *(bench.engine.load_adapter("a", bench.source(s)) for s in ("s1", "s2")),
            return_exceptions=True,
        )
        assert sorted(type(r).__name__ for r in results) == ["AdapterExists", "AdapterInfo"]
        assert len(await bench.engine.adapters()) == 1


async def test_a_taken_name_is_refused_before_anything_is_read(running: Running) -> None:
    async with running(at_start="a") as bench:
        bench.worker.in_read.clear()
        with pytest.raises(AdapterExists):
            await bench.engine.load_adapter("a", bench.source("b"))
        assert not bench.worker.in_read.is_set()


async def test_a_load_that_is_refused_leaves_the_engine_alive(
    running: Running, tmp_path: Path
) -> None:
    async with running() as bench:
        with pytest.raises(AdapterRefused):
            await bench.engine.load_adapter("a", bench.source("bad"))
        with pytest.raises(AdapterSourceNotFound):
            await bench.engine.load_adapter("a", str(tmp_path / "missing"))
        with pytest.raises(UnknownAdapter):
            await bench.engine.unload_adapter("a")
        assert (await outcome(await bench.submit())).tokens == following(4)


async def test_a_call_that_is_cancelled_harms_nothing(running: Running) -> None:
    async with running() as bench:
        bench.worker.step_gate.clear()
        stream = await bench.submit()
        await bench.hold_step()
        unloading = asyncio.create_task(bench.engine.unload_adapter("a"))
        await asyncio.sleep(0)
        unloading.cancel()
        bench.worker.step_gate.set()
        assert (await outcome(stream)).tokens == following(4)
        assert bench.engine.failure is None


# Failure


async def fail_in_step(bench: Bench) -> list[EngineStream]:
    """Two streams, one of them not yet with the core, and a step that is about to fail."""
    bench.worker.step_gate.clear()
    streams = [await bench.submit(n=2)]
    await bench.hold_step()
    streams.append(await bench.submit(n=2))
    bench.worker.failure = RuntimeError("the device is lost")
    return streams


async def test_a_failed_step_ends_every_stream_with_an_error(running: Running) -> None:
    async with running() as bench:
        streams = await fail_in_step(bench)
        bench.worker.step_gate.set()
        for stream in streams:
            for done in await outcomes(stream, 2):
                assert done.finish_reason == "error"
                assert "the device is lost" in (done.error or "")


async def test_a_failed_engine_takes_nothing_new(running: Running) -> None:
    async with running(at_start="a") as bench:
        (stream, _) = await fail_in_step(bench)
        bench.worker.step_gate.set()
        await outcomes(stream, 2)
        assert "the device is lost" in (bench.engine.failure or "")
        with pytest.raises(EngineStopped, match="the device is lost"):
            await bench.submit()
        with pytest.raises(EngineStopped, match="the device is lost"):
            await bench.engine.load_adapter("b", bench.source("b"))
        with pytest.raises(EngineStopped, match="the device is lost"):
            await bench.engine.unload_adapter("a")


async def test_a_failed_engine_still_tells_its_state(running: Running) -> None:
    async with running(at_start="a") as bench:
        (stream, _) = await fail_in_step(bench)
        bench.worker.step_gate.set()
        await outcomes(stream, 2)
        assert [info.name for info in await bench.engine.adapters()] == ["a"]
        assert (await bench.engine.stats()).num_steps == 0


async def test_a_failed_step_ends_the_calls_that_wait(running: Running) -> None:
    async with running(at_start="a") as bench:
        await fail_in_step(bench)
        unloading = asyncio.create_task(bench.engine.unload_adapter("a"))
        await asyncio.sleep(0)
        bench.worker.step_gate.set()
        with pytest.raises(EngineStopped, match="the device is lost"):
            await unloading


async def test_an_adapter_read_while_the_engine_fails_is_not_loaded(running: Running) -> None:
    async with running() as bench:
        bench.worker.read_gate.clear()
        loading = asyncio.create_task(bench.engine.load_adapter("a", bench.source("a")))
        (stream, _) = await fail_in_step(bench)
        bench.worker.step_gate.set()
        await outcomes(stream, 2)
        bench.worker.read_gate.set()
        with pytest.raises(EngineStopped):
            await loading


@pytest.mark.parametrize("command", ["add", "abort"])
async def test_a_command_that_raises_is_a_failure(
    running: Running, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    async with running() as bench:
        monkeypatch.setattr(bench.small.core, command, broken)
        bench.worker.step_gate.clear()
        stream = await bench.submit()
        stream.abort()
        bench.worker.step_gate.set()
        done = await outcome(stream)
        assert (done.finish_reason, "a bug" in (done.error or "")) == ("error", True)


async def test_a_worker_that_cannot_install_is_a_failure(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise MemoryError("no room")

    async with running() as bench:
        monkeypatch.setattr(bench.worker, "install", broken)
        with pytest.raises(EngineStopped, match="no room"):
            await bench.engine.load_adapter("a", bench.source("a"))


# Stop


async def test_stopping_ends_streams_and_keeps_what_they_had(running: Running) -> None:
    async with running() as bench:
        bench.worker.step_gate.clear()
        stream = await bench.submit(max_tokens=20)
        await bench.hold_step()
        stopping = asyncio.create_task(bench.engine.stop())
        await asyncio.sleep(0)
        bench.worker.step_gate.set()
        done = await outcome(stream)
        assert (done.tokens, done.finish_reason) == (following(1), "abort")
        await stopping


async def test_a_stopped_engine_takes_nothing_new(running: Running) -> None:
    async with running() as bench:
        await bench.engine.stop()
        assert bench.engine.failure == "the engine has been stopped"
        with pytest.raises(EngineStopped, match="stopped"):
            await bench.submit()


async def test_nothing_is_taken_while_the_engine_stops(running: Running) -> None:
    async with running() as bench:
        stopping = asyncio.create_task(bench.engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await bench.submit()
        await stopping


async def test_an_adapter_read_while_the_engine_stops_is_not_loaded(running: Running) -> None:
    async with running() as bench:
        bench.worker.read_gate.clear()
        loading = asyncio.create_task(bench.engine.load_adapter("a", bench.source("a")))
        assert await asyncio.to_thread(bench.worker.in_read.wait, 10)
        await bench.engine.stop()
        bench.worker.read_gate.set()
        with pytest.raises(EngineStopped):
            await loading


async def test_stopping_twice_waits_twice(running: Running) -> None:
    async with running() as bench:
        bench.worker.step_gate.clear()
        await bench.submit()
        await bench.hold_step()
        stops = [asyncio.create_task(bench.engine.stop()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in stops)
        bench.worker.step_gate.set()
        await asyncio.gather(*stops)


async def test_an_engine_that_was_not_started_can_be_stopped(tmp_path: Path) -> None:
    await Bench(tmp_path).engine.stop()


async def test_an_engine_that_was_not_started_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineStopped):
        await Bench(tmp_path).submit()


async def test_a_failed_engine_can_be_stopped(running: Running) -> None:
    async with running() as bench:
        (stream, _) = await fail_in_step(bench)
        bench.worker.step_gate.set()
        await outcomes(stream, 2)
        await bench.engine.stop()
        assert "the device is lost" in (bench.engine.failure or "")


# Adapters whose copies come and go

ONE_COPY = {"adapter_bytes": {"a": 60, "b": 60}, "host_bytes": 100}
"""Host memory holds a copy of either adapter."""


async def test_an_adapter_without_a_copy_is_read_again(running: Running) -> None:
    async with running(at_start="ab", **ONE_COPY) as bench:
        for name in "abba":
            done = await outcome(await bench.submit(name))
            assert done.tokens == following(4, name)
        assert bench.small.core.stats().host_evictions >= 2


async def test_streams_go_on_while_an_adapter_is_read_again(running: Running) -> None:
    async with running(at_start="ab", **ONE_COPY) as bench:
        assert (await outcome(await bench.submit("b"))).tokens == following(4, "b")
        bench.worker.read_gate.clear()
        bench.worker.in_read.clear()
        late = asyncio.create_task(outcome(await bench.submit("a")))
        assert await asyncio.to_thread(bench.worker.in_read.wait, 10)
        for model in (None, None):
            assert (await outcome(await bench.submit(model))).finish_reason == "length"
        assert not late.done()
        bench.worker.read_gate.set()
        assert (await late).tokens == following(4, "a")


async def test_the_engine_makes_no_steps_while_all_wait_for_a_source(running: Running) -> None:
    async with running(at_start="ab", **ONE_COPY) as bench:
        await outcome(await bench.submit("b"))
        bench.worker.read_gate.clear()
        late = asyncio.create_task(outcome(await bench.submit("a")))
        await asyncio.sleep(0.05)
        num_steps = bench.small.core.stats().num_steps
        used = time.process_time()
        await asyncio.sleep(0.2)
        assert time.process_time() - used < 0.1, "the engine's thread spins"
        assert bench.small.core.stats().num_steps == num_steps
        bench.worker.read_gate.set()
        assert (await late).finish_reason == "length"


async def test_a_source_that_is_gone_ends_the_requests_that_wait_for_it_alone(
    running: Running,
) -> None:
    async with running(at_start="ab", **ONE_COPY) as bench:
        await outcome(await bench.submit("b"))
        (bench.folder / "a").rmdir()
        failed, fine = await asyncio.gather(
            outcome(await bench.submit("a")), outcome(await bench.submit("b"))
        )
        assert failed.finish_reason == "error"
        assert "there is no such directory" in (failed.error or "")
        assert fine.tokens == following(4, "b")
        (bench.folder / "a").mkdir()
        assert (await outcome(await bench.submit("a"))).tokens == following(4, "a")


async def test_a_source_with_other_weights_is_not_taken_for_the_adapter(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(at_start="ab", **ONE_COPY) as bench:
        await outcome(await bench.submit("b"))
        read = bench.worker.read_adapter
        other = replace(read("a", bench.folder / "a"), adapter_id=AdapterId("other"))
        monkeypatch.setattr(bench.worker, "read_adapter", lambda name, directory: other)
        failed = await outcome(await bench.submit("a"))
        assert failed.finish_reason == "error"
        assert "load_inplace" in (failed.error or "")
        assert "other" not in bench.worker.installed
