"""Whose turn it is: a lower priority first, then the earlier arrival."""

from __future__ import annotations

import pytest

from loramux.errors import InvalidRequest
from loramux.scheduling.drains import Drains
from loramux.scheduling.request import Request
from loramux.types import AdapterId, EmbeddingRequest, GenerationRequest
from tests.unit.small_engine import SmallEngine
from tests.unit.test_scheduler import Bench


def running(bench: Bench) -> list[str]:
    return [r.request_id for r in bench.scheduler.requests() if r.running]


def run_until(bench: Bench, *ended: Request, most: int = 200) -> None:
    """Step until some requests have all their tokens, and remove each that does."""
    open_ = {r.request_id for r in ended}
    for _ in range(most):
        if not open_:
            return
        bench.step()
        for request in list(bench.scheduler.requests()):
            if len(request.tokens) >= request.max_total_tokens:
                bench.remove(request)
                open_.discard(request.request_id)
    raise AssertionError(f"{open_} do not end")


def test_waiting_requests_start_by_priority_and_then_by_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    first = bench.add(2)
    bench.step()
    for priority in (3, 0, -1, 0, -1):
        bench.add(2, priority=priority)
    order = []
    while bench.scheduler.has_work:
        bench.remove(next(r for r in bench.scheduler.requests() if r.running))
        if bench.scheduler.has_work:
            order += bench.step()
    assert first.request_id == "r0"
    assert order == ["r3", "r5", "r2", "r4", "r1"]


def test_one_that_waits_preempts_nobody() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(2)
    bench.step()
    bench.add(2, priority=-9)
    assert bench.step() == {"r0": 1}


def test_a_chunk_of_a_prompt_is_given_to_the_lowest_number_first() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add(20, priority=1)
    bench.step()
    bench.add(20)
    assert bench.step() == {"r0": 8}  # it runs already, and gets what it can use
    bench.step()
    assert bench.step() == {"r1": 7, "r0": 1}


def test_without_blocks_the_highest_number_is_preempted() -> None:
    bench = Bench(num_blocks=6, max_step_tokens=64)
    early = bench.add(8, priority=1)
    late = [bench.add(8, priority=0), bench.add(8, priority=-1)]
    bench.step()
    bench.step()
    assert early.num_preemptions == 1
    assert [r.num_preemptions for r in late] == [0, 0]


def test_of_one_number_the_latest_is_preempted() -> None:
    bench = Bench(num_blocks=6, max_step_tokens=64)
    requests = [bench.add(8, priority=5) for _ in range(2)]
    requests.append(bench.add(8, priority=0))
    bench.step()
    bench.step()
    assert [r.num_preemptions for r in requests] == [0, 1, 0]


def test_a_request_preempts_itself_before_one_with_a_lower_number() -> None:
    bench = Bench(num_blocks=4)
    urgent, other = bench.add(9, priority=-1), bench.add(4)
    for _ in range(8):
        bench.step()
    assert urgent.num_preemptions == 0
    assert other.num_preemptions == 1


def test_two_never_preempt_each_other() -> None:
    """Both need most of the blocks; the one with the first turn ends without a break."""
    bench = Bench(num_blocks=5, max_step_tokens=64)
    later = bench.add(8, priority=1, room=11)
    bench.step()
    first = bench.add(8, priority=0, room=11)
    run_until(bench, first)
    assert (first.num_preemptions, later.num_preemptions) == (0, 1)
    run_until(bench, later)
    assert later.num_preemptions == 1


def test_those_that_wait_go_on_when_urgent_ones_come_to_an_end() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2)
    patient = bench.add(8, room=8)
    for _ in range(12):
        run_until(bench, bench.add(8, priority=-1, room=4))
    assert patient.num_preemptions > 0
    run_until(bench, patient)


class TestDrains:
    """The bound of an adapter's wait holds among equals, and never holds up more urgent ones."""

    def late(self, priority: int = 0, **limits: int) -> tuple[Bench, Request, Request]:
        """``a`` runs in the only slot with priority 0, and ``b`` has waited too long for it."""
        bench = Bench(num_slots=1, max_wait=5.0, **limits)
        holder = bench.add(2, "a", room=50)
        bench.step()
        waiting = bench.add(2, "b", priority=priority)
        bench.step()
        bench.now = 6.0
        bench.step()
        assert bench.scheduler.num_drains == 1
        return bench, holder, waiting

    def test_an_equal_one_of_the_drained_adapter_does_not_start(self) -> None:
        bench, *_ = self.late()
        bench.add(2, "a")
        assert "r2" not in bench.step()

    def test_a_less_urgent_one_of_the_drained_adapter_does_not_start(self) -> None:
        bench, *_ = self.late()
        bench.add(2, "a", priority=1)
        assert "r2" not in bench.step()

    def test_a_more_urgent_one_starts_and_ends_the_drain(self) -> None:
        bench, *_ = self.late()
        urgent = bench.add(2, "a", priority=-1)
        assert "r2" in bench.step()
        bench.now = 100.0
        for _ in range(4):  # nor is anybody preempted for it while that one runs
            assert {"r0", "r2"} <= bench.step().keys()
        bench.remove(urgent)
        bench.step()
        assert bench.scheduler.num_drains == 2

    def test_a_drain_that_takes_too_long_preempts_for_an_equal_one(self) -> None:
        bench, holder, waiting = self.late()
        bench.now = 12.0
        bench.step()
        assert holder.num_preemptions == 1
        assert waiting.running

    def test_an_adapter_that_runs_more_urgent_ones_is_not_drained(self) -> None:
        bench = Bench(num_slots=2, max_wait=5.0, max_num_seqs=8)
        bench.add(2, "a", priority=-1, room=50)
        others = [bench.add(2, "b", room=50) for _ in range(2)]
        bench.step()
        waiting = bench.add(2, "c")
        bench.step()
        for now in (6.0, 12.0):
            bench.now = now
            bench.step()
        assert waiting.running
        assert [r.num_preemptions for r in others] == [1, 1]
        assert "r0" in running(bench)

    def test_urgent_ones_are_not_held_up_for_one_that_waits_for_a_place(self) -> None:
        """``b`` has its turn for the slot, but the places go to more urgent ones of the base."""
        bench, holder, waiting = self.late(max_num_seqs=3)
        bases = [bench.add(2, priority=-2, room=50) for _ in range(2)]
        bench.step()
        bench.remove(holder)
        bench.add(2, priority=-2, room=50)
        urgent = bench.add(2, "a", priority=-1)
        bench.step()
        assert not waiting.running
        bench.remove(bases[0])
        bench.step()
        assert urgent.running

    def test_a_drain_ends_when_who_it_is_for_becomes_less_urgent(self) -> None:
        bench, holder, waiting = self.late(priority=-1)
        less = bench.add(2, "b", priority=1)
        bench.step()
        bench.remove(waiting)
        bench.now = 20.0
        bench.step()
        assert holder.num_preemptions == 0
        assert not less.running

    def test_the_next_slot_is_the_most_urgent_adapters(self) -> None:
        bench, holder, waiting = self.late()
        urgent = bench.add(2, "c", priority=-1)
        bench.step()
        bench.remove(holder)
        bench.step()
        assert (urgent.running, waiting.running) == (True, False)

    def test_adapters_of_all_priorities_come_to_an_end(self) -> None:
        bench = Bench(num_slots=1, max_wait=2.0)
        requests = [
            bench.add(3, adapter, priority=priority, room=6)
            for priority in (2, -1, 0)
            for adapter in "abc"
        ]
        for request in requests:
            while request in bench.scheduler.requests():
                bench.now += 1.0
                bench.step()
                for done in list(bench.scheduler.requests()):
                    if len(done.tokens) >= done.max_total_tokens:
                        bench.remove(done)
            assert bench.now < 500


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_engine_serves_by_priority(runs_ahead: bool) -> None:
    engine = SmallEngine(max_num_seqs=1, runs_ahead=runs_ahead, adapters="a")
    ids = [
        engine.submit("a", [1, 2], max_tokens=3),
        engine.submit(None, [1, 2], max_tokens=3, priority=2, n=2),
        engine.embed("a", [1, 2], priority=-1),
        engine.submit("a", [1, 2], max_tokens=3, priority=-2),
    ]
    ended = []
    while engine.core.has_work:
        ended += [d.request_id for d in engine.step() if d.finish_reason is not None]
    assert ended == [ids[3], ids[2], ids[0], ids[1], ids[1]]
    engine.check_idle()


@pytest.mark.parametrize("kind", [GenerationRequest, EmbeddingRequest])
@pytest.mark.parametrize("priority", [-(2**31) - 1, 2**31, 1.0, True, "1", None])
def test_what_is_no_priority_is_refused_by_name(kind: type, priority: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        kind(prompt_token_ids=[1], priority=priority)
    assert refused.value.param == "priority"


def test_copies_are_kept_by_turn_among_adapters_that_wait_too_long() -> None:
    now = 0.0
    drains = Drains(1.0, lambda: now)
    a, b, c = map(AdapterId, "abc")
    for adapter_id, priority in ((a, 0), (b, -1), (c, 0)):
        drains.note_wait(
            adapter_id, priority, running={}, never=(), can_place=lambda adapter, in_use: False
        )
        now += 1.0
    assert drains.may_push_aside(b, a)
    assert not drains.may_push_aside(a, b)
    assert drains.may_push_aside(a, c)
    assert not drains.may_push_aside(c, a)
