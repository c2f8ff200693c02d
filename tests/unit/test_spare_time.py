"""What the engine's thread does while nobody asks it for anything."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from loramux.errors import EngineStopped
from tests.unit.test_async_engine import Bench, GatedWorker, following, outcome, started

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class BusyWorker(GatedWorker):
    """Has three things to do in spare time; each waits for a gate."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.chores = 3
        self.chore_gate, self.in_chore = threading.Event(), threading.Event()

    def use_spare_time(self) -> bool:
        super().use_spare_time()
        if not self.chores:
            return False
        self.in_chore.set()
        assert self.chore_gate.wait(10)
        self.chores -= 1
        return True


class FailingWorker(GatedWorker):
    def use_spare_time(self) -> bool:
        raise RuntimeError("the device is gone")


async def in_chore(bench: Bench) -> BusyWorker:
    assert isinstance(bench.worker, BusyWorker)
    assert await asyncio.to_thread(bench.worker.in_chore.wait, 10)
    return bench.worker


async def test_spare_time_is_used_until_nothing_is_left(tmp_path: Path) -> None:
    async with started(tmp_path, worker_type=BusyWorker) as bench:
        worker = await in_chore(bench)
        worker.chore_gate.set()
        while worker.chores:
            await asyncio.sleep(0.01)
        assert (await outcome(await bench.submit())).tokens == following(4)


async def test_a_request_waits_for_one_thing_at_most(tmp_path: Path) -> None:
    async with started(tmp_path, worker_type=BusyWorker) as bench:
        worker = await in_chore(bench)
        stream = await bench.submit()
        worker.step_gate.clear()
        worker.chore_gate.set()
        await bench.hold_step()
        assert worker.chores == 2
        worker.step_gate.set()
        assert (await outcome(stream)).tokens == following(4)


async def test_requests_close_behind_each_other_wait_for_nothing(tmp_path: Path) -> None:
    async with started(tmp_path, worker_type=BusyWorker) as bench:
        for _ in range(20):
            await outcome(await bench.submit())
        assert isinstance(bench.worker, BusyWorker)
        assert not bench.worker.in_chore.is_set()
        bench.worker.chore_gate.set()


async def test_a_failure_in_spare_time_is_one_of_the_engine(tmp_path: Path) -> None:
    async with started(tmp_path, worker_type=FailingWorker) as bench:
        while bench.engine.failure is None:
            await asyncio.sleep(0.01)
        assert "the device is gone" in bench.engine.failure
        with pytest.raises(EngineStopped, match="the device is gone"):
            await bench.submit()
