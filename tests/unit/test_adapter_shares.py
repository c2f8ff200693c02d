"""The scheduler and the engine with shares for adapters."""

from __future__ import annotations

import pytest

from loramux.scheduling.request import Request
from loramux.types import Delta, RequestId
from tests.unit.small_engine import SmallEngine
from tests.unit.test_priority import run_until
from tests.unit.test_scheduler import Bench


def order_of_starts(bench: Bench) -> list[str | None]:
    """Run one after the other; the adapters in order of their starts."""
    adapters = []
    while bench.scheduler.has_work:
        bench.step()
        running = next(r for r in bench.scheduler.requests() if r.running)
        adapters.append(running.adapter)
        run_until(bench, running)
    return adapters


def ends(engine: SmallEngine) -> list[RequestId]:
    """Run to the end; the requests in order of their ends."""
    ended: list[Delta] = []
    while engine.core.has_work:
        ended += [d for d in engine.step() if d.finish_reason is not None]
    return [delta.request_id for delta in ended]


def charge(bench: Bench, request: Request) -> float:
    """Tokens that an adapter has been charged for, by the start of its next request.

    Another request must keep the virtual time from going on.
    """
    assert bench.shares is not None
    probe = bench.add(1, request.adapter)
    bench.remove(probe)
    return probe.turn[1] / bench.shares.price(request.adapter)


def test_a_flood_leaves_another_its_share() -> None:
    bench = Bench(max_num_seqs=1, weights="a=2,*=1")
    for _ in range(8):
        bench.add(4, "a", room=4)
    for _ in range(3):
        bench.add(4, "b", room=4)
    assert "".join(map(str, order_of_starts(bench))) == "abaabaabaaa"


def test_the_base_has_a_share_as_adapters_have() -> None:
    bench = Bench(max_num_seqs=1, weights="*=1")
    for _ in range(4):
        bench.add(4, "a")
    bench.add(4)
    assert order_of_starts(bench) == ["a", None, "a", "a", "a"]


def test_without_weights_order_is_that_of_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    requests = [bench.add(4, adapter) for adapter in "aaaab"]
    assert [r.turn for r in requests] == [(0, 0, number) for number in range(5)]
    assert order_of_starts(bench) == list("aaaab")


def test_a_priority_comes_before_a_share() -> None:
    bench = Bench(max_num_seqs=1, weights="*=1")
    for _ in range(3):
        bench.add(4, "a", priority=-1)
    bench.add(4, "b")
    assert order_of_starts(bench) == list("aaab")


def test_who_waits_for_a_slot_gets_one_in_time_behind_all_others_in_line() -> None:
    bench = Bench(num_slots=1, max_wait=5.0, weights="a=1000,*=1")
    bench.add(2, room=50)
    early = bench.add(2, "b")
    run_until(bench, early)
    holder = bench.add(2, "a", room=50)
    bench.step()
    waiting = bench.add(2, "b")
    bench.step()
    bench.now = 6.0
    bench.step()
    assert bench.scheduler.num_drains == 1
    flood = bench.add(2, "a")
    assert flood.turn < waiting.turn
    bench.step()
    assert not flood.running
    bench.now = 12.0
    bench.step()
    assert (holder.num_preemptions, waiting.running) == (1, True)


def test_who_was_passed_for_want_of_a_slot_keeps_its_place_in_line() -> None:
    bench = Bench(num_slots=1, max_num_seqs=2, weights="*=1")
    holder = bench.add(2, "a", room=50)
    bench.step()
    waiting = bench.add(2, "b")
    for _ in range(3):
        run_until(bench, bench.add(2))
    last = bench.add(2)
    bench.remove(holder)
    assert waiting.turn < last.turn
    bench.step()
    assert waiting.running


class TestCharges:
    """What a request is charged for when it has ended, while the base keeps the time at 0."""

    def bench(self, **options: int) -> Bench:
        bench = Bench(weights="*=1", **options)
        bench.add(1, room=100 if "num_blocks" not in options else 8)
        bench.step()
        return bench

    def test_what_it_may_use_while_it_is_there(self) -> None:
        bench = self.bench(num_blocks=40)
        assert charge(bench, bench.add(5, "a", room=7)) == 12

    def test_what_it_has_used_when_it_ends_early(self) -> None:
        bench = self.bench(num_blocks=40)
        request = bench.add(5, "a", room=30)
        bench.step()
        bench.step()
        bench.remove(request)
        assert charge(bench, request) == 5 + 2

    def test_nothing_when_it_is_cancelled_before_its_start(self) -> None:
        bench = self.bench(num_blocks=40)
        request = bench.add(5, "a")
        bench.remove(request)
        assert charge(bench, request) == 0

    def test_what_was_read_of_its_prompt_when_it_is_cancelled_on_the_way(self) -> None:
        bench = self.bench(num_blocks=40, max_step_tokens=8)
        request = bench.add(20, "a", room=30)
        bench.step()
        assert request.num_computed == 7
        bench.remove(request)
        assert charge(bench, request) == 7

    def test_each_token_once_when_it_is_preempted(self) -> None:
        bench = self.bench(num_blocks=5)
        request = bench.add(8, "a", room=12)
        late = bench.add(4, "b", room=12)
        run_until(bench, request)
        run_until(bench, late)
        assert late.num_preemptions > 0
        assert [r.num_used for r in (request, late)] == [20, 16]

    def preempted_at_6(self) -> tuple[Bench, Request, Request]:
        bench = Bench(num_blocks=4, max_step_tokens=5, weights="*=1")
        first, late = bench.add(3, room=13), bench.add(9, "a", room=7)
        assert bench.step() | bench.step() == {"r0": 1, "r1": 4}
        assert late.num_computed == 6
        assert bench.step() == {"r0": 1}
        return bench, first, late

    def test_what_was_read_before_a_preemption_when_it_is_cancelled_behind_it(self) -> None:
        bench, _, late = self.preempted_at_6()
        bench.remove(late)
        assert charge(bench, late) == 6

    def test_the_most_that_was_read_when_it_is_cancelled_earlier_the_next_time(self) -> None:
        bench, first, late = self.preempted_at_6()
        bench.remove(first)
        assert bench.step() == {"r1": 5}
        bench.remove(late)
        assert late.num_used == 6


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_serves_by_shares(runs_ahead: bool) -> None:
    engine = SmallEngine(max_num_seqs=1, runs_ahead=runs_ahead, adapters="ab", weights="a=2,*=1")
    flood = [engine.submit("a", [1, 2], max_tokens=4) for _ in range(6)]
    few = [engine.submit("b", [1, 2], max_tokens=4) for _ in range(2)]
    base = engine.submit(None, [3, 4], max_tokens=4)
    a, b = iter(flood), iter(few)
    order = [next(a), next(b), base, *[next(a), next(a)], next(b), *a]
    assert ends(engine) == order
    engine.check_idle()


def test_completions_of_one_request_and_embeddings_are_charged_for() -> None:
    engine = SmallEngine(max_num_seqs=1, adapters="ab", weights="*=1")
    many = engine.submit("a", [1, 2], max_tokens=4, n=3)
    one = engine.submit("b", [1, 2], max_tokens=4)
    vector = engine.embed("b", [1, 2, 3])
    assert ends(engine) == [many, one, many, vector, many]


def test_a_prompt_that_was_found_is_given_back() -> None:
    engine = SmallEngine(max_num_seqs=1, num_blocks=40, adapters="ab", weights="*=1")
    prompt = list(range(17))
    engine.submit("a", prompt, max_tokens=1)
    engine.run()
    engine.submit("b", [1], max_tokens=12)
    engine.step()
    found = engine.submit("a", prompt, max_tokens=2)
    engine.run()
    [sequence] = [s for s in engine.sequences if s.parent_id == found]
    assert (sequence.num_cached, sequence.num_used) == (16, 3)


def test_names_of_one_adapter_have_a_share_each() -> None:
    engine = SmallEngine(max_num_seqs=1, weights="x=1,y=1")
    engine.load("x", "same")
    engine.load("y", "same")
    first, second = [engine.submit("x", [1, 2], max_tokens=4) for _ in range(2)]
    other = engine.submit("y", [1, 2], max_tokens=4)
    assert ends(engine) == [first, other, second]


def test_a_name_that_is_given_other_bytes_keeps_its_account() -> None:
    engine = SmallEngine(max_num_seqs=1, adapters="ab", weights="*=1")
    first = engine.submit("a", [1, 2], max_tokens=4)
    engine.load("a", "other", replace=True)
    second = engine.submit("a", [1, 2], max_tokens=4)
    other = engine.submit("b", [1, 2], max_tokens=4)
    assert ends(engine) == [first, other, second]


def test_weights_are_shown() -> None:
    engine = SmallEngine(adapters="ab", weights="a=4,later=3,*=0.5")
    assert [info.weight for info in engine.core.adapters.infos()] == [4, 0.5]
    engine.load("later", "c")
    assert engine.core.adapters.infos()[-1].weight == 3
    assert SmallEngine(adapters="a").core.adapters.infos()[0].weight is None
