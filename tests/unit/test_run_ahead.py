"""A step in flight: when the next one is launched before its result, and what comes between."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from loramux.errors import EngineStopped
from loramux.plan import PENDING_TOKEN, StepPlan, StepResult
from loramux.testing import FakeWorker, expected_tokens
from loramux.testing.worker import FakeLaunchedStep
from loramux.types import RequestId
from tests.unit.small_engine import SmallEngine

PROMPT = [1, 2, 3, 4, 5]


@dataclass(frozen=True)
class LoggedStep:
    step: FakeLaunchedStep
    worker: LoggingWorker
    load_seconds: float = 0.0

    def result(self) -> StepResult:
        self.worker.log += "r"
        time.sleep(self.worker.seconds)
        if self.worker.lost:
            raise RuntimeError("the device is lost")
        return self.step.result()


class LoggingWorker(FakeWorker):
    """Writes ``l`` for a launch and ``r`` for a result that is asked for; each takes its time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log = ""
        self.plans: list[StepPlan] = []
        self.seconds = 0.0
        self.lost = False

    def launch(self, plan: StepPlan) -> Any:
        self.log += "l"
        self.plans.append(plan)
        return LoggedStep(super().launch(plan), self)


def engine_with(**options: Any) -> tuple[SmallEngine, LoggingWorker]:
    engine = SmallEngine(worker_type=LoggingWorker, **{"runs_ahead": True, **options})
    assert isinstance(engine.worker, LoggingWorker)
    return engine, engine.worker


def following(count: int, adapter_id: str | None = None) -> list[int]:
    return expected_tokens(adapter_id, PROMPT, count)


def rows(worker: LoggingWorker) -> int:
    return sum(len(plan.sequences) for plan in worker.plans)


# When the next step is launched


def test_the_next_step_is_launched_before_a_result_is_asked_for() -> None:
    engine, worker = engine_with()
    engine.submit(None, PROMPT, max_tokens=4)
    engine.run()
    assert worker.log == "llrlrlrr"
    pending = [plan.sequences[0].token_ids == [PENDING_TOKEN] for plan in worker.plans]
    assert pending == [False, True, True, True]


def test_after_a_move_one_step_is_in_flight_and_its_tokens_are_not_known() -> None:
    engine, worker = engine_with()
    request_id = engine.submit(None, PROMPT, max_tokens=4)
    engine.step()
    assert worker.num_outstanding == 1
    assert engine.outcomes[request_id][0].tokens == following(1)


def test_a_worker_that_does_not_run_ahead_is_waited_for() -> None:
    engine, worker = engine_with(runs_ahead=False)
    engine.submit(None, PROMPT, max_tokens=3)
    engine.run()
    assert worker.log == "lrlrlr"


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.1},
        {"min_tokens": 3, "stop_token_ids": (0,)},
    ],
    ids=str,
)
def test_a_sequence_whose_sampling_changes_with_its_output_is_waited_for(
    params: dict[str, Any],
) -> None:
    engine, worker = engine_with()
    engine.submit(None, PROMPT, max_tokens=3, **params)
    engine.run()
    assert worker.log == "lrlrlr"


def test_after_min_tokens_nothing_is_waited_for() -> None:
    engine, worker = engine_with()
    ends = tuple(following(1))
    request_id = engine.submit(None, PROMPT, max_tokens=5, min_tokens=2, stop_token_ids=ends)
    engine.run()
    assert worker.log == "lrlrllrlrr"
    wanted = expected_tokens(None, PROMPT, 5, min_tokens=2, ends=ends)
    assert engine.outcomes[request_id][0].tokens == wanted


def test_a_prompt_is_waited_for_while_its_logprobs_are_reported() -> None:
    engine, worker = engine_with(max_step_tokens=4)
    engine.submit(None, [*PROMPT, 6, 7], prompt_logprobs=0, max_tokens=4)
    engine.run()
    assert worker.log == "lrlrllrlrr"


def test_a_penalised_sequence_is_read_ahead_up_to_its_first_token() -> None:
    engine, worker = engine_with(max_step_tokens=4)
    engine.submit(None, [*range(10)], presence_penalty=1.0, max_tokens=2)
    engine.run()
    assert worker.log == "llrlrrlr"


def test_one_sequence_to_wait_for_makes_its_whole_step_wait() -> None:
    engine, worker = engine_with()
    plain = engine.submit(None, PROMPT, max_tokens=5)
    engine.submit(None, [9], max_tokens=2, presence_penalty=1.0)
    engine.run()
    assert worker.log == "lrlrllrlrr"
    assert engine.outcomes[plain][0].tokens == following(5)


# What a sequence's end does to the step that was launched with it


@pytest.mark.parametrize("limit", [{"max_tokens": 1}, {"max_tokens": 3}, {}], ids=str)
def test_a_sequence_at_its_limit_has_no_row_in_vain(limit: dict[str, int]) -> None:
    engine, worker = engine_with(max_model_len=9)
    request_id = engine.submit(None, PROMPT, **limit)
    engine.run()
    tokens = engine.outcomes[request_id][0].tokens
    assert tokens == following(limit.get("max_tokens", 4))
    assert rows(worker) == len(tokens)


def test_the_place_of_a_sequence_at_its_limit_is_taken_in_the_very_next_step() -> None:
    engine, worker = engine_with(max_num_seqs=1)
    for _ in range(2):
        engine.submit(None, PROMPT, max_tokens=2)
    engine.run()
    assert worker.log == "llrlrlrr"


def test_a_stop_token_makes_one_row_in_vain_and_ends_there() -> None:
    engine, worker = engine_with()
    tokens = following(3)
    request_id = engine.submit(None, PROMPT, stop_token_ids=tokens[2:], max_tokens=9)
    engine.run()
    engine.check_idle()
    outcome = engine.outcomes[request_id][0]
    assert (outcome.tokens, outcome.stop_reason) == (tokens, tokens[2])
    assert rows(worker) == 4
    assert engine.core.stats().output_tokens == 3


def test_blocks_of_a_row_in_vain_are_given_away_at_once() -> None:
    engine, _ = engine_with(num_blocks=2, max_model_len=8)
    tokens = following(2)
    engine.submit(None, PROMPT, stop_token_ids=tokens[1:], max_tokens=3)
    after = engine.submit(None, [9] * 5, max_tokens=3)
    for _ in range(2):
        engine.step()
    assert engine.core.stats().kv_blocks_used == 0
    engine.run()
    assert engine.outcomes[after][0].tokens == expected_tokens(None, [9] * 5, 3)


def test_the_slot_of_a_row_in_vain_is_given_away_at_once() -> None:
    engine, worker = engine_with(num_slots=1, adapters=["a", "b"])
    engine.submit("a", PROMPT, stop_token_ids=following(2, "a")[1:])
    other = engine.submit("b", PROMPT, max_tokens=3)
    for _ in range(3):
        engine.step()
    assert list(worker.slots.values()) == ["b"]
    engine.run()
    assert engine.outcomes[other][0].tokens == following(3, "b")


def test_a_row_that_fails_wastes_the_one_launched_after_it() -> None:
    engine, worker = engine_with()
    request_id = engine.submit(None, PROMPT, max_tokens=9)
    worker.row_errors[RequestId(f"{request_id}/0")] = "the logits are NaN"
    engine.run()
    engine.check_idle()
    outcome = engine.outcomes[request_id][0]
    assert (outcome.finish_reason, outcome.tokens, rows(worker)) == ("error", [], 2)


def test_an_error_of_a_row_in_vain_is_nobodys() -> None:
    engine, worker = engine_with()
    tokens = following(2)
    request_id = engine.submit(None, PROMPT, stop_token_ids=tokens[1:])
    engine.step()
    worker.row_errors[RequestId(f"{request_id}/0")] = "the logits are NaN"
    engine.run()
    assert worker.row_errors == {}
    assert engine.outcomes[request_id][0].finish_reason == "stop"


def test_an_unloaded_adapter_goes_with_its_last_request_though_a_row_is_in_flight() -> None:
    engine, worker = engine_with(adapters=["a"])
    engine.submit("a", PROMPT, stop_token_ids=following(2, "a")[1:])
    engine.step()
    engine.unload("a")
    engine.step()
    assert (worker.num_outstanding, worker.installed, worker.slots) == (1, {}, {})
    engine.run()
    engine.check_idle()


# Preemption and aborts


def test_a_request_preempted_with_a_token_in_flight_has_the_same_answer() -> None:
    engine, _ = engine_with(num_blocks=4, max_model_len=16, max_step_tokens=16)
    ids = [engine.submit(None, [i] * 8, max_tokens=8) for i in range(2)]
    engine.step()
    assert engine.core.stats().preemptions == 1
    assert [engine.outcomes[i][0].tokens for i in ids] == [
        expected_tokens(None, [i] * 8, 1) for i in range(2)
    ]
    engine.run()
    for i, request_id in enumerate(ids):
        assert engine.outcomes[request_id][0].tokens == expected_tokens(None, [i] * 8, 8)


def test_a_preempted_request_may_end_by_the_token_in_flight() -> None:
    engine, _ = engine_with(num_blocks=4, max_model_len=16, max_step_tokens=16)
    engine.submit(None, [0] * 8, max_tokens=8)
    last = expected_tokens(None, [1] * 8, 1)
    stopped = engine.submit(None, [1] * 8, max_tokens=8, stop_token_ids=last)
    engine.step()
    assert engine.core.stats().preemptions == 1
    assert engine.outcomes[stopped][0].finish_reason == "stop"
    engine.run()
    engine.check_idle()


def test_prompt_logprobs_come_once_though_a_preemption_interrupts_them() -> None:
    engine, _ = engine_with(num_blocks=5, max_model_len=20, max_step_tokens=9)
    engine.submit(None, [0] * 8, max_tokens=12)
    request_id = engine.submit(None, list(range(12)), prompt_logprobs=0, max_tokens=2)
    engine.run()
    assert engine.core.stats().preemptions > 0
    (reported,) = engine.outcomes[request_id][0].prompt_logprobs
    assert [entry and entry.token_id for entry in reported] == [None, *range(1, 12)]


def test_an_abort_drops_the_token_in_flight() -> None:
    engine, _ = engine_with()
    request_id = engine.submit(None, PROMPT, max_tokens=9)
    engine.step()
    engine.abort(request_id)
    assert engine.core.has_work
    assert engine.step() == []
    engine.check_idle()
    assert engine.outcomes[request_id][0].tokens == following(1)


def test_a_row_in_flight_is_not_taken_for_a_new_request_with_the_same_id() -> None:
    engine, _ = engine_with()
    request_id = RequestId("again")
    engine.submit(None, PROMPT, request_id=request_id, max_tokens=9)
    engine.step()
    engine.abort(request_id)
    engine.submit(None, [9], request_id=request_id, max_tokens=3)
    engine.run()
    assert engine.outcomes[request_id][0].tokens == expected_tokens(None, [9], 3)


# Failure


def test_a_step_that_fails_in_flight_stops_the_engine() -> None:
    engine, worker = engine_with()
    request_id = engine.submit(None, PROMPT, max_tokens=2)
    engine.step()
    worker.lost = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step()
    worker.lost = False
    with pytest.raises(EngineStopped, match="the device is lost"):
        engine.step()
    engine.core.abort(request_id)
    assert not engine.core.has_work


def test_a_launch_that_fails_stops_the_engine_though_a_step_is_in_flight() -> None:
    engine, worker = engine_with()
    request_id = engine.submit(None, PROMPT, max_tokens=9)
    engine.step()
    worker.failure = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert worker.log == "llrl"
    engine.core.abort(request_id)
    assert not engine.core.has_work


# Counters


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_seconds_of_steps_that_overlap_are_counted_once(runs_ahead: bool) -> None:
    engine, worker = engine_with(runs_ahead=runs_ahead)
    worker.seconds = 0.005
    engine.submit(None, PROMPT, max_tokens=8)
    began = time.perf_counter()
    engine.run()
    elapsed = time.perf_counter() - began
    seconds = engine.core.stats().step_seconds
    assert 8 * worker.seconds <= seconds.total <= elapsed
    assert sum(seconds.counts) >= 8
