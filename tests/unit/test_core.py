"""Requests and adapters in an engine without threads, whether it runs ahead or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from loramux.errors import (
    AdapterExists,
    AdapterRefused,
    EngineStopped,
    UnknownAdapter,
    UnknownModel,
)
from loramux.testing import expected_prompt_logprobs, expected_tokens
from loramux.types import RequestId, Waited
from tests.unit.small_engine import SmallEngine

PROMPT = [1, 2, 3, 4, 5]

Make = Callable[..., SmallEngine]


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(SmallEngine, runs_ahead=request.param)


def answer(engine: SmallEngine, model: str | None = None, **params: Any) -> Any:
    """The outcome of one request that runs alone."""
    request_id = engine.submit(model, PROMPT, **params)
    engine.run()
    engine.check_idle()
    return engine.outcomes[request_id][0]


def following(count: int, adapter_id: str | None = None) -> list[int]:
    return expected_tokens(adapter_id, PROMPT, count)


# Answers


def test_each_model_has_its_own_answer_in_one_batch(make: Make) -> None:
    engine = make(adapters=["a", "b"])
    ids = {model: engine.submit(model, PROMPT, max_tokens=4) for model in (None, "a", "b")}
    engine.run()
    for model, request_id in ids.items():
        assert engine.outcomes[request_id][0].tokens == following(4, model)
    assert engine.core.stats().max_step_adapters == 2


def test_more_adapters_than_slots_are_all_answered(make: Make) -> None:
    engine = make(num_slots=1, adapters=["a", "b", "c"])
    ids = {model: engine.submit(model, PROMPT, max_tokens=4) for model in "abcab"}
    engine.run()
    for model, request_id in ids.items():
        assert engine.outcomes[request_id][0].tokens == following(4, model)
    assert engine.core.stats().max_step_adapters == 1


def test_the_first_delta_of_each_completion_tells_how_long_it_waited(make: Make) -> None:
    engine = make(adapters=["a", "b"], num_slots=1)
    first = engine.submit("a", PROMPT, max_tokens=3)
    engine.step()
    second, base = engine.submit("b", PROMPT, max_tokens=3, n=2), engine.submit(None, PROMPT)
    engine.now = 2.0
    engine.step()
    engine.now = 7.0
    engine.run()
    assert engine.outcomes[first][0].waits == [Waited(0.0, 0.0)]
    assert [one.waits for one in engine.outcomes[second]] == [[Waited(7.0, 5.0)]] * 2
    assert engine.outcomes[base][0].waits == [Waited(2.0, 0.0)]


def test_a_preempted_request_tells_of_its_first_wait_alone(make: Make) -> None:
    engine = make(num_blocks=8, max_step_tokens=32)
    ids = [engine.submit(None, [i] * 12, max_tokens=8) for i in range(2)]
    while engine.core.has_work:
        engine.step()
        engine.now += 1.0
    assert engine.core.stats().preemptions == 1
    assert [engine.outcomes[i][0].waits for i in ids] == [[Waited(0.0, 0.0)]] * 2


def test_what_never_started_tells_of_no_wait(make: Make) -> None:
    engine = make(adapters=["a", "b"], num_slots=1)
    engine.submit("a", PROMPT, max_tokens=3)
    engine.step()
    waiting = engine.submit("b", PROMPT)
    engine.abort(waiting)
    assert engine.outcomes[waiting][0].waits == []


def test_a_preempted_request_has_the_same_answer(make: Make) -> None:
    engine = make(num_blocks=8, max_step_tokens=32)
    ids = [engine.submit(None, [i] * 12, max_tokens=8) for i in range(2)]
    engine.run()
    assert engine.core.stats().preemptions == 1
    for i, request_id in enumerate(ids):
        assert engine.outcomes[request_id][0].tokens == expected_tokens(None, [i] * 12, 8)


def test_completions_of_one_request_are_numbered_and_differ(make: Make) -> None:
    engine = make()
    request_id = engine.submit(None, PROMPT, n=3, temperature=1.0, seed=7, max_tokens=4)
    engine.run()
    assert [outcome.tokens for outcome in engine.outcomes[request_id]] == [
        expected_tokens(None, PROMPT, 4, seed=seed) for seed in (7, 8, 9)
    ]


def test_max_tokens_end_for_length(make: Make) -> None:
    outcome = answer(make(), max_tokens=3)
    assert (len(outcome.tokens), outcome.finish_reason) == (3, "length")


def test_the_context_ends_for_length(make: Make) -> None:
    outcome = answer(make(max_model_len=9))
    assert (len(outcome.tokens), outcome.finish_reason) == (4, "length")


def test_eos_ends_without_a_reason_and_without_its_text(make: Make) -> None:
    tokens = following(3)
    outcome = answer(make(eos=tokens[2:3]))
    assert (outcome.tokens, outcome.finish_reason, outcome.stop_reason) == (tokens, "stop", None)
    assert outcome.text == "".join(map(chr, tokens[:2]))


def test_ignored_eos_is_an_ordinary_token(make: Make) -> None:
    outcome = answer(make(eos=following(1)), ignore_eos=True, max_tokens=2)
    assert outcome.tokens == following(2)


def test_a_stop_token_ends_and_is_the_reason(make: Make) -> None:
    tokens = following(3)
    outcome = answer(make(), stop_token_ids=tokens[2:])
    assert (outcome.tokens, outcome.stop_reason) == (tokens, tokens[2])


def test_a_stop_string_over_two_tokens_ends_and_is_cut_off(make: Make) -> None:
    tokens = following(3)
    stop = "".join(map(chr, tokens[1:]))
    outcome = answer(make(), stop=stop)
    assert (outcome.tokens, outcome.text, outcome.stop_reason) == (tokens, chr(tokens[0]), stop)


def test_a_stop_string_can_be_kept(make: Make) -> None:
    tokens = following(2)
    text = "".join(map(chr, tokens))
    outcome = answer(make(), stop=text, include_stop_str_in_output=True)
    assert outcome.text == text


def test_ends_are_avoided_until_min_tokens(make: Make) -> None:
    ends = following(1)
    outcome = answer(make(eos=ends), min_tokens=2, max_tokens=4)
    assert outcome.tokens[0] not in ends
    assert outcome.tokens[:2] == expected_tokens(None, PROMPT, 2, min_tokens=2, ends=ends)


@pytest.mark.parametrize("max_step_tokens", [4, 32])
def test_prompt_logprobs_come_once_and_whole(make: Make, max_step_tokens: int) -> None:
    engine = make(max_step_tokens=max_step_tokens)
    outcome = answer(engine, prompt_logprobs=1, max_tokens=3)
    assert outcome.prompt_logprobs == [(None, *expected_prompt_logprobs(None, PROMPT, 1))]


def test_prompt_logprobs_of_one_token_are_one_none(make: Make) -> None:
    engine = make()
    request_id = engine.submit(None, [7], prompt_logprobs=0, max_tokens=1)
    engine.run()
    assert engine.outcomes[request_id][0].prompt_logprobs == [(None,)]


def test_each_completion_has_the_prompt_logprobs(make: Make) -> None:
    engine = make()
    request_id = engine.submit(None, PROMPT, n=2, prompt_logprobs=0, max_tokens=2)
    engine.run()
    assert [len(outcome.prompt_logprobs) for outcome in engine.outcomes[request_id]] == [1, 1]


def test_a_prompt_that_was_not_read_to_its_end_has_no_logprobs(make: Make) -> None:
    engine = make(max_step_tokens=4)
    request_id = engine.submit(None, PROMPT * 2, prompt_logprobs=0, max_tokens=2)
    engine.step()
    engine.abort(request_id)
    assert engine.outcomes[request_id][0].prompt_logprobs == []


def test_an_error_in_one_row_ends_that_row_alone(make: Make) -> None:
    engine = make()
    bad, good = (engine.submit(None, PROMPT, max_tokens=3) for _ in range(2))
    engine.step()
    engine.worker.row_errors[RequestId(f"{bad}/0")] = "the logits are NaN"
    engine.run()
    engine.check_idle()
    assert engine.outcomes[bad][0].finish_reason == "error"
    assert engine.outcomes[bad][0].error == "the logits are NaN"
    assert engine.outcomes[good][0].tokens == following(3)


# Aborts


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_every_completion_and_frees_all(make: Make, steps: int) -> None:
    engine = make(max_num_seqs=2, max_step_tokens=4, adapters=["a"])
    request_id = engine.submit("a", PROMPT, n=3, max_tokens=8)
    for _ in range(steps):
        engine.step()
    engine.abort(request_id)
    assert [o.finish_reason for o in engine.outcomes[request_id]] == ["abort"] * 3
    assert engine.core.stats().kv_blocks_used == 0
    engine.run()
    engine.check_idle()


def test_an_abort_shows_the_text_held_back(make: Make) -> None:
    engine = make()
    first = following(1)[0]
    request_id = engine.submit(None, PROMPT, stop=chr(first) + "never", max_tokens=8)
    engine.step()
    assert engine.outcomes[request_id][0].text == ""
    engine.abort(request_id)
    assert engine.outcomes[request_id][0].text == chr(first)


def test_a_second_abort_does_nothing(make: Make) -> None:
    engine = make()
    request_id = engine.submit(None, PROMPT)
    engine.abort(request_id)
    assert engine.core.abort(request_id) == []
    assert engine.core.stats().requests_aborted == 1


def test_an_abort_after_the_end_does_nothing(make: Make) -> None:
    engine = make()
    request_id = engine.submit(None, PROMPT, max_tokens=1)
    engine.run()
    assert engine.core.abort(request_id) == []


def test_an_abort_leaves_other_requests_alone(make: Make) -> None:
    engine = make()
    one, other = engine.submit(None, PROMPT, max_tokens=6), engine.submit(None, [9], max_tokens=6)
    engine.step()
    engine.abort(one)
    engine.run()
    assert engine.outcomes[other][0].tokens == expected_tokens(None, [9], 6)


# Adapters


def test_an_unloaded_adapter_finishes_its_requests(make: Make) -> None:
    engine = make(adapters=["a"])
    running, waiting = (engine.submit("a", PROMPT, max_tokens=4) for _ in range(2))
    engine.step()
    engine.unload("a")
    assert "a" in engine.worker.installed
    engine.run()
    for request_id in (running, waiting):
        assert engine.outcomes[request_id][0].tokens == following(4, "a")


def test_an_unloaded_adapter_is_freed_after_its_last_request(make: Make) -> None:
    engine = make(adapters=["a"])
    engine.submit("a", PROMPT, max_tokens=2)
    engine.step()
    engine.unload("a")
    engine.run()
    assert (engine.worker.installed, engine.worker.slots) == ({}, {})
    assert engine.core.stats().adapter_bytes == 0


def test_an_unloaded_idle_adapter_is_freed_at_once(make: Make) -> None:
    engine = make(adapters=["a"])
    answer(engine, "a", max_tokens=1)
    engine.unload("a")
    assert (engine.worker.installed, engine.worker.slots) == ({}, {})


def test_an_unloaded_name_is_unknown(make: Make) -> None:
    engine = make(adapters=["a"])
    engine.unload("a")
    with pytest.raises(UnknownModel):
        engine.submit("a", PROMPT)


def test_a_replaced_adapter_finishes_its_requests_while_new_ones_get_the_new(make: Make) -> None:
    engine = make()
    engine.load("a", "old")
    before = engine.submit("a", PROMPT, max_tokens=4)
    engine.step()
    engine.load("a", "new", replace=True)
    after = engine.submit("a", PROMPT, max_tokens=4)
    engine.run()
    engine.check_idle()
    assert engine.outcomes[before][0].tokens == following(4, "old")
    assert engine.outcomes[after][0].tokens == following(4, "new")
    assert list(engine.worker.installed) == ["new"]


def test_a_waiting_request_keeps_the_adapter_its_name_meant(make: Make) -> None:
    engine = make()
    engine.load("a", "old")
    request_id = engine.submit("a", PROMPT, max_tokens=4)
    engine.load("a", "new", replace=True)
    engine.run()
    assert engine.outcomes[request_id][0].tokens == following(4, "old")


def test_the_same_bytes_under_two_names_are_kept_once(make: Make) -> None:
    engine = make(adapter_bytes={"same": 70})
    engine.load("a", "same")
    engine.load("b", "same")
    for name in "ab":
        engine.submit(name, PROMPT, max_tokens=2)
    engine.run()
    assert (len(engine.worker.installed), len(engine.worker.slots)) == (1, 1)


def test_bytes_live_until_the_last_of_their_names_goes(make: Make) -> None:
    engine = make()
    engine.load("a", "same")
    engine.load("b", "same")
    engine.unload("a")
    assert answer(engine, "b", max_tokens=2).tokens == following(2, "same")
    engine.unload("b")
    assert engine.worker.installed == {}


def test_an_unloaded_adapter_can_be_loaded_again_while_its_requests_run(make: Make) -> None:
    engine = make(adapters=["a"])
    request_id = engine.submit("a", PROMPT, max_tokens=4)
    engine.step()
    engine.unload("a")
    engine.load("a")
    engine.run()
    engine.check_idle()
    assert engine.outcomes[request_id][0].tokens == following(4, "a")


def test_an_adapter_that_is_too_large_leaves_nothing_behind(make: Make) -> None:
    engine = make(adapter_bytes={"huge": 101})
    with pytest.raises(AdapterRefused, match="--device-cache 101"):
        engine.load("a", "huge")
    assert engine.worker.installed == {}
    engine.check_idle()


def test_a_replacement_that_is_refused_leaves_the_old_adapter(make: Make) -> None:
    engine = make(adapters=["a"], adapter_bytes={"huge": 101})
    with pytest.raises(AdapterRefused):
        engine.load("a", "huge", replace=True)
    assert answer(engine, "a", max_tokens=2).tokens == following(2, "a")


def test_a_taken_name_leaves_nothing_behind(make: Make) -> None:
    engine = make(adapters=["a"])
    with pytest.raises(AdapterExists):
        engine.load("a", "other")
    assert list(engine.worker.installed) == ["a"]


# Pins


def test_a_pin_without_a_slot_for_others_leaves_nothing_behind(make: Make) -> None:
    engine = make(num_slots=1)
    with pytest.raises(AdapterRefused, match="--max-loras 2"):
        engine.load("a", pinned=True)
    assert engine.worker.installed == {}


def test_a_pinned_adapter_keeps_its_slot_while_others_come_and_go(make: Make) -> None:
    engine = make()
    for name in "abc":
        engine.load(name, pinned=name == "a")
        answer(engine, name, max_tokens=1)
    assert set(engine.worker.slots.values()) == {"a", "c"}


def test_a_pinned_adapter_can_be_replaced_by_a_pinned_one(make: Make) -> None:
    engine = make(num_slots=2)
    engine.load("a", "old", pinned=True)
    engine.load("a", "new", pinned=True, replace=True)
    assert [info.pinned for info in engine.core.adapters.infos()] == [True]


def test_the_pin_of_a_replaced_adapter_is_gone_while_its_requests_run(make: Make) -> None:
    engine = make(num_slots=2)
    engine.load("a", "old", pinned=True)
    engine.submit("a", PROMPT, max_tokens=4)
    engine.step()
    engine.load("a", "new", replace=True)
    engine.load("b", pinned=True)


def test_the_pin_of_an_unloaded_adapter_is_gone_while_its_requests_run(make: Make) -> None:
    engine = make(num_slots=2)
    engine.load("a", pinned=True)
    engine.submit("a", PROMPT, max_tokens=4)
    engine.step()
    engine.unload("a")
    engine.load("b", pinned=True)


def test_a_second_pinned_name_of_one_adapter_takes_no_second_pin(make: Make) -> None:
    engine = make(num_slots=2, adapter_bytes={"same": 60})
    engine.load("a", "same", pinned=True)
    engine.load("b", "same", pinned=True)
    engine.unload("a")
    assert [info.pinned for info in engine.core.adapters.infos()] == [True]


def test_a_pin_must_leave_room_for_the_adapters_that_are_known(make: Make) -> None:
    engine = make(adapter_bytes={"a": 60, "b": 50})
    engine.load("a")
    with pytest.raises(AdapterRefused, match="--device-cache 110"):
        engine.load("b", pinned=True)


# Failure


def test_a_failed_step_is_raised(make: Make) -> None:
    engine = make()
    engine.submit(None, PROMPT)
    engine.worker.failure = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step()


def test_a_failed_engine_takes_no_further_step(make: Make) -> None:
    engine = make()
    engine.submit(None, PROMPT)
    engine.worker.failure = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError):
        engine.step()
    engine.worker.failure = None
    with pytest.raises(EngineStopped, match="the device is lost"):
        engine.step()


# Counters


def test_tokens_and_steps_are_counted(make: Make) -> None:
    engine = make(max_step_tokens=4)
    answer(engine, max_tokens=3)
    stats = engine.core.stats()
    assert (stats.num_steps, stats.prompt_tokens, stats.output_tokens) == (4, 5, 3)


def test_steps_are_sorted_by_their_sequences_and_adapters(make: Make) -> None:
    engine = make(num_slots=2, adapters=["a", "b"], max_step_tokens=32)
    for name in ("a", "b", None):
        engine.submit(name, PROMPT, max_tokens=2)
    engine.run()
    stats = engine.core.stats()
    assert (stats.step_sequences.total, stats.step_adapters.total) == (6, 4)
    assert sum(stats.step_seconds.counts) == stats.num_steps == 2
    assert sum(stats.queue_seconds.counts) == 3


def test_slot_loads_and_evictions_are_counted(make: Make) -> None:
    engine = make(num_slots=1, adapters=["a", "b"])
    for name in "aab":
        answer(engine, name, max_tokens=1)
    engine.unload("b")
    stats = engine.core.stats()
    assert (stats.slot_loads, stats.slot_evictions) == (2, 1)


def test_requests_that_finish_and_that_are_aborted_are_counted_apart(make: Make) -> None:
    engine = make()
    answer(engine, max_tokens=1)
    engine.abort(engine.submit(None, PROMPT))
    stats = engine.core.stats()
    assert (stats.requests_finished, stats.requests_aborted) == (1, 1)


def test_an_adapter_shows_its_slot_and_its_requests(make: Make) -> None:
    engine = make(adapters=["a"])
    engine.submit("a", PROMPT, n=2, max_tokens=4)
    engine.step()
    (info,) = engine.core.adapters.infos()
    assert (info.slot, info.in_flight) == (0, 2)


def test_a_pin_after_the_load_keeps_the_slot_until_it_is_taken_back() -> None:
    engine = SmallEngine(num_slots=2, adapters=["a", "b", "c"])
    engine.submit("a", [1, 2], max_tokens=1)
    engine.run()
    assert engine.core.adapters.set_pinned("a", True).pinned
    for name in ("b", "c", "b"):
        engine.submit(name, [1, 2], max_tokens=1)
        engine.run()
    assert "a" in engine.worker.slots.values()
    engine.core.adapters.set_pinned("a", False)
    engine.submit("c", [1, 2], max_tokens=1)
    engine.run()
    assert "a" not in engine.worker.slots.values()
    engine.check_idle()


def test_a_pin_after_the_load_is_refused_for_the_reasons_of_one_at_load() -> None:
    engine = SmallEngine(num_slots=2, adapters=["a", "b"])
    engine.core.adapters.set_pinned("a", True)
    with pytest.raises(AdapterRefused, match="would leave no slot for others"):
        engine.core.adapters.set_pinned("b", True)
    with pytest.raises(UnknownAdapter):
        engine.core.adapters.set_pinned("nobody", True)
    assert [info.pinned for info in engine.core.adapters.infos()] == [True, False]
    engine.core.adapters.set_pinned("a", True)  # again: nothing changes
    engine.check_idle()
