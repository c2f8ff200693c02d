"""What requests find of their adapters, how long they wait, and what is advised."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from loramux.adapters.residency import Residency
from loramux.engine.pool_watch import ADVICE_EVERY, MANY_SWAPS, PoolWatch, Pressure, advice
from loramux.types import AdapterId
from tests.unit.residents import add_with_copy
from tests.unit.small_engine import SmallEngine

PROMPT = [1, 2, 3]
MB = 10**6

PRESSURE = Pressure(
    num_swaps=87,
    num_adapters=12,
    num_bytes=12 * 84 * MB,
    num_slots=8,
    capacity_bytes=8 * 84 * MB,
    slot_bytes=84 * MB,
)


def test_more_slots_are_advised_with_what_they_cost() -> None:
    assert advice(PRESSURE) == (
        "12 adapters alternate over 8 slots, 87 swaps in the last 60 s: "
        "start with --max-loras 12 (+336 MB)"
    )


def test_adapters_larger_than_the_slots_bytes_need_a_larger_arena_too() -> None:
    text = advice(replace(PRESSURE, num_bytes=1500 * MB))
    assert text is not None
    assert text.endswith("--max-loras 12 --device-cache 1500000000 (+828 MB)")


def test_slots_in_an_arena_of_a_given_size_cost_nothing() -> None:
    text = advice(replace(PRESSURE, slot_bytes=0, num_bytes=600 * MB))
    assert text is not None
    assert text.endswith("start with --max-loras 12")


def test_bytes_alone_may_be_short() -> None:
    text = advice(replace(PRESSURE, num_adapters=3, num_bytes=700 * MB))
    assert text is not None
    assert text.endswith("start with --device-cache 700000000 (+28 MB)")


def test_nothing_is_advised_where_all_fit() -> None:
    assert advice(replace(PRESSURE, num_adapters=8, num_bytes=8 * 84 * MB)) is None


class Watched:
    """A pool of two slots whose three adapters take turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.residency = Residency(num_slots=2, capacity_bytes=20, host_bytes=100)
        self.names = [add_with_copy(self.residency, name, 10) for name in "abc"]
        self.watch = PoolWatch(self.residency, slot_bytes=10, clock=lambda: self.now)

    def take_turns(self, count: int, *, every: float) -> None:
        for i in range(count):
            self.now += every
            adapter_id = self.names[i % 3]
            self.watch.note_request(adapter_id)
            self.residency.place(adapter_id, in_use=())
            self.watch.look()


def test_swapping_is_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    pool = Watched()
    pool.take_turns(300, every=0.5)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"3 adapters alternate over 2 slots, {MANY_SWAPS} swaps in the last 60 s: "
        "start with --max-loras 3 (+1 MB)"
    ]
    pool.now += ADVICE_EVERY
    pool.take_turns(300, every=0.5)
    assert len(caplog.records) == 2


def test_rare_swaps_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    Watched().take_turns(200, every=2.0)
    assert caplog.records == []


def test_adapters_that_nobody_asks_for_any_more_do_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Watched()
    pool.watch.note_request(add_with_copy(pool.residency, "old", 10))
    gone = add_with_copy(pool.residency, "gone", 10)
    pool.now += 100
    pool.watch.note_request(gone)
    pool.residency.forget(AdapterId("gone"))
    pool.take_turns(200, every=0.5)
    assert caplog.records[0].getMessage().startswith("3 adapters alternate")


def test_each_sequence_is_counted_where_it_finds_its_adapter() -> None:
    engine = SmallEngine(
        num_slots=1, arena_bytes=10, host_bytes=20, adapters=["a", "b", "c"],
        adapter_bytes=dict.fromkeys("abc", 10),
    )  # fmt: skip
    engine.submit("b", PROMPT, max_tokens=2, n=2)  # both find the copy
    engine.run()
    engine.submit("b", PROMPT, max_tokens=2)
    engine.submit("a", PROMPT, max_tokens=2)
    engine.submit(None, PROMPT, max_tokens=2)
    engine.run()
    stats = engine.core.stats()
    assert (stats.found_in_slot, stats.found_in_host, stats.found_in_source) == (1, 2, 1)
    assert stats.host_loads == 4
    assert sum(stats.read_seconds.counts) == 4
    assert sum(stats.slot_load_seconds.counts) == stats.slot_loads == 2


def test_waits_for_a_slot_are_measured_up_to_the_start() -> None:
    engine = SmallEngine(num_slots=1, max_num_seqs=2, adapters=["a", "b"])
    engine.submit("a", PROMPT, max_tokens=3)
    engine.submit("b", PROMPT, max_tokens=3)
    while engine.core.has_work:
        engine.step()
        engine.now += 10
    waits = engine.core.stats().slot_wait_seconds
    assert sum(waits.counts) == 2
    assert waits.total == 30
    assert waits.counts[0] == 1


def test_a_wait_for_the_source_is_one_for_a_slot() -> None:
    engine = SmallEngine(
        num_slots=1, arena_bytes=10, host_bytes=10, adapters=["a", "b"],
        adapter_bytes=dict.fromkeys("ab", 10),
    )  # fmt: skip
    engine.submit("a", PROMPT, max_tokens=1)
    engine.now += 7
    engine.run()
    assert engine.core.stats().slot_wait_seconds.total == 7


def test_stats_name_running_and_waiting_adapters() -> None:
    engine = SmallEngine(num_slots=1, adapters=["a", "b"])
    engine.load("also-a", "a")
    engine.submit("a", PROMPT, max_tokens=4)
    engine.submit("b", PROMPT, max_tokens=4)
    engine.step()
    stats = engine.core.stats()
    assert stats.running_adapters == ("a", "also-a")
    assert stats.waiting_adapters == ("b",)
    engine.run()
    assert engine.core.stats().running_adapters == ()


def test_infos_tell_tier_last_use_and_last_error() -> None:
    engine = SmallEngine(
        num_slots=1, arena_bytes=10, host_bytes=10, adapters=["a", "b"],
        adapter_bytes=dict.fromkeys("ab", 10),
    )  # fmt: skip

    def infos() -> list[tuple[str, bool, str | None]]:
        return [
            (i.tier, i.last_used is not None, i.last_error) for i in engine.core.adapters.infos()
        ]

    assert infos() == [("source", False, None), ("host", False, None)]
    engine.submit("a", PROMPT, max_tokens=1)
    engine.fetch(error="the disk is gone")
    assert infos() == [("source", True, "the disk is gone"), ("source", False, None)]
    engine.submit("a", PROMPT, max_tokens=1)
    engine.run()
    assert infos() == [("slot", True, None), ("source", False, None)]
