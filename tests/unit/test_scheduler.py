"""Which sequences take part in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from loramux.adapter_weights import AdapterWeights
from loramux.adapters.residency import Residency
from loramux.plan import PENDING_TOKEN, SlotClear, SlotLoad
from loramux.scheduling.blocks import BlockAllocator
from loramux.scheduling.drains import Drains
from loramux.scheduling.fair_shares import FairShares
from loramux.scheduling.request import Request
from loramux.scheduling.scheduler import Scheduler
from loramux.scheduling.steps import Limits, Step
from loramux.types import AdapterId, RequestId, SamplingParams, Slot, TokenLogprobs
from tests.unit.residents import add_with_copy


class Bench:
    """A scheduler and a hand that commits steps: the next token of any sequence is 9."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        num_slots: int = 2,
        max_num_seqs: int = 4,
        max_step_tokens: int = 16,
        adapters: Sequence[str] = "abc",
        max_wait: float = math.inf,
        max_load_bytes: int = 100,
        weights: str | None = None,
    ) -> None:
        self.now = 0.0
        self.under_way: set[Slot] = set()
        """Slots that the device has not brought an adapter to yet."""
        self.blocks = BlockAllocator(num_blocks)
        self.residency = Residency(num_slots, 100, host_bytes=1000)
        for name in adapters:
            add_with_copy(self.residency, name, 1)
        limits = Limits(max_num_seqs, max_step_tokens, 4, max_load_bytes)
        self.shares = None
        if weights is not None:
            self.shares = FairShares(AdapterWeights.parse(weights), lambda name: True)
        self.scheduler = Scheduler(
            limits,
            self.blocks,
            self.residency,
            drains=Drains(max_wait, lambda: self.now),
            shares=self.shares,
            has_arrived=lambda slot: slot not in self.under_way,
            clock=lambda: self.now,
        )
        self.count = 0

    def add(
        self,
        length: int,
        adapter: str | None = None,
        *,
        room: int = 8,
        priority: int = 0,
        **params: int,
    ) -> Request:
        request = Request(
            request_id=RequestId(f"r{self.count}"),
            parent_id=RequestId(f"r{self.count}"),
            index=0,
            params=SamplingParams(**params),
            seed=0,
            adapter_id=None if adapter is None else AdapterId(adapter),
            tokens=list(range(length)),
            num_prompt_tokens=length,
            max_total_tokens=length + room,
            adapter=adapter,
            priority=priority,
        )
        self.count += 1
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """Run a step; the number of tokens of each request in it, in the plan's order."""
        self.last = self.launch()
        self.commit(self.last)
        return counts(self.last)

    def launch(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.check()
        return step

    def commit(self, step: Step) -> None:
        for request, part in zip(step.requests, step.plan.sequences, strict=True):
            request.prompt_logprobs += [TokenLogprobs(t, -1.0) for t in part.next_prompt_tokens]
            if part.sample is not None:
                request.land(9)
        self.scheduler.check()

    def remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.scheduler.check()


def counts(step: Step) -> dict[str, int]:
    return {part.request_id: len(part.token_ids) for part in step.plan.sequences}


def test_without_work_there_is_no_step() -> None:
    assert Bench().scheduler.schedule() is None


def test_a_prompt_is_read_at_once_when_it_fits() -> None:
    bench = Bench()
    bench.add(7)
    assert [bench.step(), bench.step()] == [{"r0": 7}, {"r0": 1}]


def test_a_long_prompt_is_read_in_chunks() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(10)
    assert [bench.step() for _ in range(4)] == [{"r0": 4}, {"r0": 4}, {"r0": 2}, {"r0": 1}]


def test_only_the_last_chunk_chooses_a_token() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(6)
    bench.step()
    assert bench.last.plan.sequences[0].sample is None
    bench.step()
    assert bench.last.plan.sequences[0].sample is not None


def test_chunks_follow_each_other() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(6)
    bench.step()
    bench.step()
    (part,) = bench.last.plan.sequences
    assert (part.start, part.token_ids, len(part.block_table)) == (4, [4, 5], 2)


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    bench = Bench(max_step_tokens=8)
    bench.add(5)
    bench.add(6)
    assert bench.step() == {"r0": 5, "r1": 3}


def test_a_long_prompt_never_holds_up_running_sequences() -> None:
    bench = Bench(max_step_tokens=5)
    bench.add(2)
    bench.step()
    bench.add(20)
    assert [bench.step() for _ in range(3)] == [{"r0": 1, "r1": 4}] * 3


def test_a_late_starter_of_early_arrival_does_not_hold_up_the_others() -> None:
    bench = Bench(max_step_tokens=5, num_slots=1)
    running = bench.add(2, "a")
    bench.step()
    bench.add(12, "b")
    bench.add(2)
    bench.add(2)
    bench.step()
    bench.remove(running)
    assert [bench.step() for _ in range(2)] == [{"r1": 3, "r2": 1, "r3": 1}] * 2


def test_no_more_sequences_run_than_allowed() -> None:
    bench = Bench(max_num_seqs=2)
    for _ in range(3):
        bench.add(2)
    assert bench.step() == {"r0": 2, "r1": 2}
    assert bench.scheduler.num_waiting == 1


def test_a_sequence_starts_when_another_ends() -> None:
    bench = Bench(max_num_seqs=1)
    first = bench.add(2)
    bench.add(2)
    bench.step()
    bench.remove(first)
    assert bench.step() == {"r1": 2}


def test_a_waiting_sequence_can_be_removed() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(2)
    bench.step()
    bench.remove(bench.add(2))
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 0)


def test_a_running_sequence_in_the_middle_can_be_removed() -> None:
    bench = Bench()
    requests = [bench.add(2) for _ in range(3)]
    bench.step()
    bench.remove(requests[1])
    assert bench.step() == {"r0": 1, "r2": 1}


def test_a_removed_sequence_gives_its_blocks_back() -> None:
    bench = Bench()
    request = bench.add(9)
    bench.step()
    assert bench.blocks.num_used == 3
    bench.remove(request)
    assert bench.blocks.num_used == 0


def test_a_sequence_waits_until_there_are_blocks_for_all_of_it() -> None:
    bench = Bench(num_blocks=4)
    first = bench.add(8)
    bench.add(12, room=4)
    assert bench.step() == {"r0": 8}
    bench.remove(first)
    assert bench.step() == {"r1": 12}


def test_nobody_passes_a_sequence_that_waits_for_blocks() -> None:
    bench = Bench(num_blocks=4)
    bench.add(8)
    bench.add(12, room=4)
    bench.add(1)
    assert bench.step() == {"r0": 8}


def preempted() -> tuple[Bench, Request, Request]:
    """Two sequences that fill the cache of 4 blocks; the next step needs a fifth."""
    bench = Bench(num_blocks=4)
    first, second = bench.add(8), bench.add(8)
    bench.step()
    bench.step()
    return bench, first, second


def test_without_blocks_the_last_to_arrive_is_preempted() -> None:
    bench, first, second = preempted()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert bench.last.requests == (first,)


def test_a_preempted_sequence_holds_nothing() -> None:
    _, _, second = preempted()
    assert (second.running, len(second.blocks), second.num_computed) == (False, 0, 0)


def test_a_preempted_sequence_is_computed_again_with_its_output() -> None:
    bench, first, second = preempted()
    bench.remove(first)
    assert bench.step() == {"r1": 9}
    assert second.tokens[8:] == [9, 9]


def test_a_preempted_sequence_runs_before_those_that_came_later() -> None:
    bench, first, _ = preempted()
    bench.add(1)
    bench.remove(first)
    assert next(iter(bench.step())) == "r1"


def test_nobody_starts_in_the_place_of_who_was_preempted() -> None:
    bench = Bench(num_blocks=4)
    bench.add(8)
    bench.add(8)
    bench.step()
    bench.add(1, room=1)
    assert bench.step() == {"r0": 1}


def test_an_early_arrival_that_started_late_is_not_preempted() -> None:
    bench = Bench(num_blocks=4, num_slots=1)
    holder = bench.add(1, "a")
    bench.step()
    early, late = bench.add(4, "b"), bench.add(8)
    bench.step()
    bench.remove(holder)
    bench.step()
    while not (early.num_preemptions or late.num_preemptions):
        bench.step()
    assert early.num_preemptions == 0


def test_the_first_in_the_middle_of_its_prompt_preempts_a_later_one() -> None:
    bench = Bench(num_blocks=4, num_slots=1, max_step_tokens=6)
    holder = bench.add(1, "a")
    bench.step()
    bench.add(12, "b", room=4)
    late = bench.add(3)
    bench.step()
    bench.remove(holder)
    assert bench.step() == {"r1": 5, "r2": 1}
    assert bench.step() == {"r1": 5}
    assert late.num_preemptions == 1


def test_a_request_without_a_slot_is_passed() -> None:
    bench = Bench(num_slots=1)
    bench.add(2, "a")
    bench.add(2, "b")
    bench.add(2, "a")
    bench.add(2)
    assert bench.step() == {"r0": 2, "r2": 2, "r3": 2}


def test_a_request_without_a_slot_is_passed_though_it_has_no_blocks_either() -> None:
    bench = Bench(num_slots=1, num_blocks=4)
    bench.add(8, "a", room=1)
    bench.add(12, "b", room=1)
    bench.add(2)
    assert bench.step() == {"r0": 8, "r2": 2}


def test_a_passed_request_runs_once_a_slot_is_idle() -> None:
    bench = Bench(num_slots=1)
    first = bench.add(2, "a")
    bench.add(2, "b")
    bench.step()
    bench.remove(first)
    assert bench.step() == {"r1": 2}
    assert bench.last.plan.slot_orders == (SlotClear(Slot(0)), SlotLoad(Slot(0), AdapterId("b"), 2))


def test_sequences_of_one_adapter_share_its_slot() -> None:
    bench = Bench()
    bench.add(2, "a")
    bench.add(2, "a")
    bench.step()
    assert len(bench.last.plan.slot_orders) == 1
    assert [part.slot for part in bench.last.plan.sequences] == [0, 0]


def test_an_adapter_keeps_its_slot_until_its_last_sequence_ends() -> None:
    bench = Bench(num_slots=1)
    first, second = bench.add(2, "a"), bench.add(2, "a")
    bench.add(2, "b")
    bench.step()
    bench.remove(first)
    assert bench.step() == {"r1": 1}
    bench.remove(second)
    assert bench.step() == {"r2": 2}


def test_the_adapter_whose_sequences_ended_first_gives_up_its_slot() -> None:
    bench = Bench()
    long, short = bench.add(2, "a"), bench.add(2, "b")
    bench.step()
    bench.remove(short)
    bench.remove(long)
    bench.add(2, "c")
    bench.step()
    assert bench.residency.find_slot(AdapterId("a")) == 0
    assert bench.residency.find_slot(AdapterId("b")) is None


def test_rows_stand_in_order_of_arrival_whatever_their_slots() -> None:
    bench = Bench()
    for adapter in (None, "b", "a", "b"):
        bench.add(2, adapter)
    bench.step()
    assert [part.slot for part in bench.last.plan.sequences] == [2, 0, 1, 0]
    assert [request.request_id for request in bench.last.requests] == ["r0", "r1", "r2", "r3"]


def test_a_row_that_was_passed_stands_before_later_arrivals_from_its_first_step() -> None:
    bench = Bench(num_slots=1)
    holder = bench.add(2, "a")
    bench.add(2, "b")
    bench.add(2)
    bench.step()
    bench.remove(holder)
    assert list(bench.step()) == list(bench.step()) == ["r1", "r2"]


def test_prompt_logprobs_are_asked_for_every_token_but_the_first() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(6, prompt_logprobs=1)
    bench.step()
    assert bench.last.plan.sequences[0].next_prompt_tokens == [1, 2, 3, 4]
    bench.step()
    assert bench.last.plan.sequences[0].next_prompt_tokens == [5]


def test_prompt_logprobs_are_not_asked_for_twice() -> None:
    bench = Bench()
    bench.add(6, prompt_logprobs=1)
    bench.step()
    bench.step()
    assert bench.last.plan.sequences[0].prompt_logprobs is None


def test_prompt_logprobs_begin_anew_after_a_preemption_in_the_prompt() -> None:
    bench = Bench(num_blocks=5, max_step_tokens=9)
    first, second = bench.add(8, room=4), bench.add(12, prompt_logprobs=1)
    bench.step()
    while not second.num_preemptions:
        bench.step()
    assert second.prompt_logprobs == []
    bench.remove(first)
    bench.step()
    bench.step()
    assert [entry.token_id for entry in second.prompt_logprobs] == list(range(1, 12))


def test_complete_prompt_logprobs_survive_a_preemption() -> None:
    bench = Bench(num_blocks=4)
    bench.add(8)
    second = bench.add(8, prompt_logprobs=1)
    bench.step()
    bench.step()
    assert second.num_preemptions == 1
    assert len(second.prompt_logprobs) == 7


def test_a_sequence_fits_when_the_whole_cache_holds_it() -> None:
    scheduler = Bench(num_blocks=4).scheduler
    assert (scheduler.fits(16), scheduler.fits(17)) == (True, False)


def test_a_sequence_that_fills_the_cache_runs_to_its_end() -> None:
    bench = Bench(num_blocks=4)
    request = bench.add(10, room=6)
    while len(request.tokens) < request.max_total_tokens:
        bench.step()
    assert request.num_preemptions == 0


@pytest.mark.parametrize("length", [0, 65])
def test_what_can_never_run_is_not_taken(length: int) -> None:
    with pytest.raises(AssertionError):
        Bench().add(length, room=1)


def test_a_step_must_hold_a_token_of_each_sequence() -> None:
    with pytest.raises(AssertionError, match="token a step"):
        Bench(max_num_seqs=4, max_step_tokens=3)


# Steps scheduled while the one before runs


def test_a_sequence_goes_on_with_the_token_that_is_pending() -> None:
    bench = Bench()
    request = bench.add(7)
    first = bench.launch()
    (part,) = bench.launch().plan.sequences
    assert part.sample is not None
    assert (part.token_ids, part.start, part.sample.position) == ([PENDING_TOKEN], 7, 1)
    assert part.sample.tokens == list(range(7))
    bench.commit(first)
    assert (request.tokens, request.num_in_flight) == ([*range(7), 9], 1)


def test_a_prompt_is_read_on_before_its_first_chunk_is_done() -> None:
    bench = Bench(max_step_tokens=4)
    bench.add(10)
    parts = [bench.launch().plan.sequences[0] for _ in range(4)]
    assert [part.start for part in parts] == [0, 4, 8, 10]
    assert [part.token_ids for part in parts[2:]] == [[8, 9], [PENDING_TOKEN]]


def test_a_sequence_that_a_pending_token_ends_takes_no_part() -> None:
    bench = Bench()
    bench.add(4, room=1)
    bench.add(4)
    bench.launch()
    assert counts(bench.launch()) == {"r1": 1}


def test_a_sequence_that_a_pending_token_ends_gives_up_blocks_slot_and_place() -> None:
    bench = Bench(num_blocks=2, num_slots=1, max_num_seqs=1)
    ending = bench.add(7, "a", room=1)
    bench.add(7, "b", room=1)
    step = bench.launch()
    assert counts(bench.launch()) == {"r1": 7}
    bench.commit(step)
    bench.remove(ending)
    assert ending.tokens == [*range(7), 9]


def test_without_anybody_to_take_part_there_is_work_and_no_step() -> None:
    bench = Bench()
    bench.add(4, room=1)
    bench.launch()
    assert bench.scheduler.schedule() is None
    bench.scheduler.check()
    assert bench.scheduler.has_work


def test_a_sequence_preempted_with_a_token_in_flight_keeps_the_token() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.add(8), bench.add(8)
    step = bench.launch()
    assert counts(bench.launch()) == {"r0": 1}
    assert (second.num_preemptions, second.num_in_flight, len(second.blocks)) == (1, 1, 0)
    bench.commit(step)
    bench.remove(first)
    assert counts(bench.launch()) == {"r1": 9}


def test_a_preempted_sequence_does_not_start_while_its_token_is_in_flight() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.add(8), bench.add(8)
    step = bench.launch()
    bench.launch()
    bench.remove(first)
    assert bench.scheduler.schedule() is None
    bench.commit(step)
    bench.launch()
    assert second.running


def test_a_removed_sequence_is_not_mistaken_for_another_with_its_id() -> None:
    bench = Bench()
    old = bench.add(4)
    bench.remove(old)
    bench.count = 0
    new = bench.add(4)
    assert (old.request_id, bench.scheduler.holds(old)) == (new.request_id, False)
    assert bench.scheduler.holds(new)


def test_the_wait_of_a_sequence_is_noted_at_its_first_start() -> None:
    bench = Bench(max_num_seqs=1, num_blocks=64)
    first = bench.add(2)
    bench.add(2)
    bench.step()
    bench.now = 3.0
    bench.remove(first)
    bench.step()
    waits = bench.scheduler.queue_waits.histogram()
    assert (sum(waits.counts), waits.total) == (2, 3.0)


def test_a_sequence_that_starts_again_has_waited_once() -> None:
    bench, first, second = preempted()
    bench.now = 5.0
    bench.remove(first)
    bench.step()
    assert second.running
    assert sum(bench.scheduler.queue_waits.histogram().counts) == 2


# Bounded copies in a step ------------------------------------------------------------------------


def coming(sizes: dict[str, int], *, running: bool, num_slots: int = 4) -> Bench:
    """Adapters of these sizes are asked for in the same moment, two bytes a step beside others."""
    bench = Bench(num_slots=num_slots, max_num_seqs=8, num_blocks=64, max_load_bytes=2, adapters="")
    if running:
        bench.add(4, room=40)
        bench.step()
    for name, size in sizes.items():
        add_with_copy(bench.residency, name, size)
        bench.add(2, name, room=40)
    return bench


def loaded(bench: Bench) -> list[str]:
    bench.step()
    return [o.adapter_id for o in bench.last.plan.slot_orders if isinstance(o, SlotLoad)]


def send(bench: Bench, *names: str) -> dict[str, int]:
    """A step that brings in these adapters, which do not arrive before ``arrive``."""
    found = bench.step()
    loads = [o for o in bench.last.plan.slot_orders if isinstance(o, SlotLoad)]
    assert [load.adapter_id for load in loads] == list(names)
    bench.under_way |= {load.slot for load in loads}
    return found


def arrive(bench: Bench, name: str) -> None:
    bench.under_way.remove(bench.residency.slot_of(AdapterId(name)))


def test_while_others_run_a_step_brings_in_few_adapters() -> None:
    bench = coming({"a": 1, "b": 1, "c": 1}, running=True)
    assert loaded(bench) == ["a", "b"]
    assert loaded(bench) == ["c"]


def test_a_step_brings_in_an_adapter_of_any_size() -> None:
    bench = coming({"a": 40, "b": 30}, running=True)
    assert loaded(bench) == ["a"]
    assert loaded(bench) == ["b"]


def test_a_small_adapter_does_not_overtake_a_large_one() -> None:
    bench = coming({"a": 1, "large": 40, "b": 1}, running=True)
    assert [loaded(bench) for _ in range(3)] == [["a"], ["large"], ["b"]]


def test_where_nobody_runs_all_come_in_at_once() -> None:
    bench = coming({"a": 40, "b": 30, "c": 1}, running=False)
    assert loaded(bench) == ["a", "b", "c"]
    assert counts(bench.last) == {"r0": 2, "r1": 2, "r2": 2}


def test_who_needs_no_copy_is_not_held_up_by_those_who_do() -> None:
    bench = coming({"a": 2, "b": 30}, running=True)
    bench.add(2, "a", room=40)
    bench.add(2)
    assert bench.step() == {"r0": 1, "r1": 2, "r3": 2, "r4": 2}


def test_no_step_waits_for_a_large_adapter_whose_requests_start_when_it_is_there() -> None:
    bench = coming({"large": 40}, running=True)
    assert send(bench, "large") == {"r0": 1}
    assert [bench.step() for _ in range(3)] == [{"r0": 1}] * 3
    arrive(bench, "large")
    assert bench.step() == {"r0": 1, "r1": 2}
    assert bench.last.plan.slot_orders == ()


def test_a_small_adapter_behind_a_large_one_does_not_wait_in_a_step() -> None:
    """Copies follow each other on the way to the device."""
    bench = coming({"large": 40, "a": 1}, running=True)
    assert send(bench, "large") == {"r0": 1}
    assert send(bench, "a") == {"r0": 1}
    arrive(bench, "large")
    assert bench.step() == {"r0": 1, "r1": 2}
    arrive(bench, "a")
    assert bench.step() == {"r0": 1, "r1": 1, "r2": 2}


def test_where_nobody_is_left_to_be_held_up_a_step_waits_for_a_large_adapter() -> None:
    bench = coming({"large": 40}, running=True)
    send(bench, "large")
    bench.remove(bench.last.requests[0])
    assert bench.step() == {"r1": 2}


def test_an_adapter_on_its_way_keeps_its_slot() -> None:
    bench = coming({"large": 40, "other": 40}, running=True, num_slots=1)
    send(bench, "large")
    assert [loaded(bench) for _ in range(2)] == [[], []]
    arrive(bench, "large")
    assert bench.step() == {"r0": 1, "r1": 2}


@pytest.mark.parametrize("forgotten", [False, True])
def test_an_adapter_that_nobody_waits_for_any_more_gives_its_slot_up_when_it_has_arrived(
    forgotten: bool,
) -> None:
    bench = coming({"large": 40}, running=True)
    send(bench, "large")
    bench.remove(next(r for r in bench.scheduler.requests() if r.adapter_id == "large"))
    bench.step()
    if forgotten:
        bench.residency.forget(AdapterId("large"))
        bench.under_way.clear()
    else:
        arrive(bench, "large")
    for name in "abcd":
        add_with_copy(bench.residency, name, 1)
        bench.add(2, name, room=40)
    bench.step()
    assert len(bench.step()) == 5, "all four slots are to be had"


# Bounded waiting for a slot ----------------------------------------------------------------------


def saturated(**options: Any) -> Bench:
    """Two slots, in which a and b run for as long as they like; c waits since time 0."""
    bench = Bench(num_slots=2, max_num_seqs=8, num_blocks=64, max_wait=2.0, **options)
    for adapter in ("a", "a", "b"):
        bench.add(4, adapter, room=40)
    bench.add(4, "c", room=40)
    bench.step()
    return bench


def test_before_the_bound_nobody_gives_up_a_slot() -> None:
    bench = saturated()
    bench.now = 1.9
    bench.add(4, "b", room=40)
    assert bench.step().keys() == {"r0", "r1", "r2", "r4"}
    assert bench.scheduler.num_drains == 0


def test_after_the_bound_the_adapter_with_the_fewest_sequences_starts_no_more() -> None:
    bench = saturated()
    bench.now = 2.0
    bench.step()
    assert bench.scheduler.num_drains == 1
    bench.add(4, "b", room=40)
    bench.add(4, "a", room=40)
    assert bench.step().keys() == {"r0", "r1", "r2", "r5"}


def test_the_slot_goes_to_the_one_who_waited_when_the_last_sequence_has_ended() -> None:
    bench = saturated()
    bench.now = 2.0
    waiting = bench.add(4, "b", room=40)
    bench.step()
    bench.remove(next(r for r in bench.scheduler.requests() if r.request_id == "r2"))
    assert bench.step().keys() == {"r0", "r1", "r3"}
    assert [type(order) for order in bench.last.plan.slot_orders] == [SlotClear, SlotLoad]
    # And the other waits in its turn, from now on.
    assert not waiting.running
    bench.now = 3.9
    bench.step()
    assert bench.scheduler.num_drains == 1
    bench.now = 4.0
    bench.step()
    assert bench.scheduler.num_drains == 2


def test_sequences_that_end_too_late_are_preempted_and_start_again() -> None:
    bench = saturated()
    bench.now = 2.0
    bench.step()
    bench.now = 3.9
    assert "r2" in bench.step()
    bench.now = 4.0
    assert bench.step().keys() == {"r0", "r1", "r3"}
    last = next(r for r in bench.scheduler.requests() if r.request_id == "r2")
    assert (last.num_preemptions, last.running) == (1, False)
    while not last.running:
        bench.now += 0.5
        bench.step()
    assert bench.now <= 4.0 + 2 * 2.0 + 0.5


def test_pinned_adapters_are_not_drained() -> None:
    bench = saturated()
    bench.residency.set_pinned({AdapterId("b")})
    bench.now = 2.0
    bench.step()
    bench.now = 4.0
    assert "r2" in bench.step()
    assert bench.scheduler.num_drains == 1
    assert bench.step().keys() == {"r2", "r3"}


def test_a_drain_for_nobody_ends() -> None:
    bench = saturated()
    bench.now = 2.0
    bench.step()
    bench.remove(next(r for r in bench.scheduler.requests() if r.request_id == "r3"))
    bench.add(4, "b", room=40)
    assert bench.step().keys() == {"r0", "r1", "r2", "r4"}
    bench.now = 9.0
    assert bench.step().keys() == {"r0", "r1", "r2", "r4"}


def test_a_large_adapter_may_need_several_slots() -> None:
    bench = Bench(num_slots=3, max_num_seqs=8, num_blocks=64, max_wait=2.0, adapters="ab")
    for name, size in (("x", 40), ("y", 40), ("large", 90)):
        add_with_copy(bench.residency, name, size)
        bench.add(4, name, room=40)
    bench.step()
    bench.now = 2.0
    bench.step()
    assert bench.scheduler.num_drains == 2
    bench.now = 4.0
    assert bench.step().keys() == {"r2"}


def test_one_hot_adapter_and_twenty_cold_ones_all_have_their_turn() -> None:
    names = [f"cold{i}" for i in range(20)]
    bench = Bench(
        num_slots=4, max_num_seqs=8, num_blocks=4096, max_wait=2.0, adapters=["hot", *names]
    )
    hot = [bench.add(4, "hot", room=900) for _ in range(4)]
    cold = [bench.add(4, name, room=900) for name in names]
    started: dict[Request, float] = {}
    while len(started) < len(cold) and bench.now < 200:
        bench.step()
        bench.now += 0.25
        for request in cold:
            if request.running:
                started.setdefault(request, bench.now)
        if sum(r.running for r in hot) < 4:
            hot.append(bench.add(4, "hot", room=900))
    # Slots change hands every bound and a drain: 20 over the slots, each for at most so long.
    assert len(started) == len(cold)
    assert max(started.values()) <= 20 * (2.0 + 2.0 + 0.5)
