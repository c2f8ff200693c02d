"""Adapters are read again in threads, with patience for sources that cannot be reached."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from loramux.adapters.spec import PreparedAdapter
from loramux.engine.adapters import IncomingAdapter
from loramux.engine.fetcher import Fetcher, Outcome
from loramux.engine.origins import Origin
from loramux.errors import AdapterRefused, AdapterSourceUnavailable
from loramux.types import AdapterId, SourceRules

pytestmark = pytest.mark.timeout(20)


def origin(name: str) -> Origin:
    return Origin(AdapterId(name), name, f"s3://bucket/{name}", None)


def incoming(name: str) -> IncomingAdapter:
    return IncomingAdapter(PreparedAdapter(AdapterId(name), 1, 8, (), content=None))


class Reader:
    """Stands for an AdapterReader; ``answers`` are given or raised, one for each call."""

    def __init__(self, *answers: IncomingAdapter | Exception) -> None:
        self.answers = list(answers)

    def read(self, name: str, source: str, rules: SourceRules | None = None) -> IncomingAdapter:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def fetched(reader: Any, *names: str) -> tuple[list[tuple[str, Outcome]], list[float]]:
    """What is delivered for these adapters, by name, and the pauses in between."""
    delivered: SimpleQueue[tuple[Origin, Outcome]] = SimpleQueue()
    pauses: list[float] = []
    fetcher = Fetcher(reader, lambda *item: delivered.put(item), sleep=pauses.append)
    fetcher.start(map(origin, names))
    found = [delivered.get(timeout=10) for _ in names]
    return sorted((o.name, outcome) for o, outcome in found), pauses


DOWN = AdapterSourceUnavailable("a", "s3://bucket/a", "the bucket does not answer")


def test_what_is_read_is_delivered() -> None:
    assert fetched(Reader(incoming("a")), "a") == ([("a", incoming("a"))], [])


def test_a_source_that_is_down_is_asked_again_later_and_later() -> None:
    assert fetched(Reader(DOWN, DOWN, incoming("a")), "a") == ([("a", incoming("a"))], [0.5, 2.0])


def test_a_source_that_stays_down_is_given_up() -> None:
    [(_, outcome)], pauses = fetched(Reader(DOWN, DOWN, DOWN), "a")
    assert "the bucket does not answer" in str(outcome)
    assert pauses == [0.5, 2.0]


def test_an_adapter_that_is_refused_is_not_asked_for_again() -> None:
    [(_, outcome)], pauses = fetched(Reader(AdapterRefused("a", ["wrong shape"])), "a")
    assert "wrong shape" in str(outcome)
    assert pauses == []


def test_a_fault_of_ours_ends_one_fetch_and_no_thread() -> None:
    reader = Reader(KeyError("oops"))
    delivered: SimpleQueue[Outcome] = SimpleQueue()
    fetcher = Fetcher(reader, lambda _, outcome: delivered.put(outcome))  # type: ignore[arg-type]
    fetcher.start([origin("a")])
    assert "KeyError" in str(delivered.get(timeout=10))
    reader.answers = [incoming("b")]
    fetcher.start([origin("b")])
    assert delivered.get(timeout=10) == incoming("b")


def test_several_are_read_at_once_and_never_too_many() -> None:
    gate, count = threading.Event(), threading.Semaphore(0)
    most = 0
    running = 0
    lock = threading.Lock()

    class Slow:
        def read(self, name: str, source: str, rules: object) -> IncomingAdapter:
            nonlocal most, running
            with lock:
                running += 1
                most = max(most, running)
            count.release()
            assert gate.wait(10)
            with lock:
                running -= 1
            return incoming(name)

    delivered: SimpleQueue[Outcome] = SimpleQueue()
    fetcher = Fetcher(Slow(), lambda _, outcome: delivered.put(outcome))  # type: ignore[arg-type]
    fetcher.start(origin(f"x{i}") for i in range(20))
    for _ in range(8):
        assert count.acquire(timeout=10)
    gate.set()
    for _ in range(20):
        delivered.get(timeout=10)
    assert most == 8
