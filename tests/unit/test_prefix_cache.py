"""What sequences find computed, told by counts: blocks of four tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from loramux.errors import InvalidRequest
from loramux.testing import expected_prompt_logprobs, expected_tokens
from tests.unit.small_engine import SmallEngine

PROMPT = list(range(10))
"""Two full blocks and a half."""

Make = Callable[..., SmallEngine]


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def make(request: pytest.FixtureRequest) -> Make:
    return partial(SmallEngine, runs_ahead=request.param, max_step_tokens=32)


def ask(
    engine: SmallEngine, model: str | None = None, prompt: list[int] = PROMPT, **params: Any
) -> int:
    """Tokens that a request finds, whose answer is right."""
    request_id = engine.submit(model, prompt, **{"max_tokens": 3, **params})
    engine.run()
    engine.check_idle()
    outcome = engine.outcomes[request_id][0]
    source = engine.core.adapters.infos() if model else []
    adapter_id = next((info.adapter_id for info in source if info.name == model), None)
    assert outcome.tokens == expected_tokens(adapter_id, prompt, len(outcome.tokens))
    return outcome.cached_tokens


def found(engine: SmallEngine) -> tuple[int, int]:
    stats = engine.core.stats()
    return stats.prefix_queries, stats.prefix_hits


# What is found


def test_the_same_prompt_is_found_in_full_blocks(make: Make) -> None:
    engine = make()
    assert [ask(engine), ask(engine)] == [0, 8]
    assert found(engine) == (20, 8)
    assert engine.core.stats().prompt_tokens == 12


def test_without_the_cache_nothing_is_looked_up(make: Make) -> None:
    engine = make(prefix_cache=False)
    assert [ask(engine), ask(engine)] == [0, 0]
    assert found(engine) == (0, 0)


def test_a_prompt_of_full_blocks_leaves_a_token_to_compute(make: Make) -> None:
    engine = make()
    prompt = PROMPT[:8]
    assert [ask(engine, prompt=prompt), ask(engine, prompt=prompt)] == [0, 4]


def test_a_first_step_may_be_a_single_token(make: Make) -> None:
    engine = make()
    ask(engine)
    prompt = PROMPT[:9]
    request_id = engine.submit(
        None, prompt, max_tokens=3, presence_penalty=1.0, temperature=1.0, seed=5, logprobs=1
    )
    engine.run()
    outcome = engine.outcomes[request_id][0]
    assert outcome.cached_tokens == 8
    assert outcome.tokens == expected_tokens(None, prompt, 3, seed=5)


def test_prompts_share_what_they_begin_with(make: Make) -> None:
    engine = make()
    ask(engine)
    assert ask(engine, prompt=[*PROMPT[:5], 99, *PROMPT[6:]]) == 4
    assert ask(engine, prompt=[99, *PROMPT[1:]]) == 0


def test_a_chat_goes_on_from_its_answer(make: Make) -> None:
    engine = make()
    ask(engine, max_tokens=7)
    # The last token of an answer is never computed: 16 of 17 are, which is four blocks.
    prompt = [*PROMPT, *expected_tokens(None, PROMPT, 7), 5, 5, 5]
    assert ask(engine, prompt=prompt) == 16


def test_what_is_computed_is_found_before_its_sequence_ends(make: Make) -> None:
    engine = make()
    engine.submit(None, PROMPT, max_tokens=20)
    engine.step()
    answer = expected_tokens(None, PROMPT, 20)
    for _ in range(8):
        engine.step()
    late = engine.submit(None, [*PROMPT, *answer[:5]], max_tokens=1)
    engine.run()
    assert engine.outcomes[late][0].cached_tokens == 12


def test_a_token_that_is_pending_has_no_key(make: Make) -> None:
    """In blocks of one token each is full at once."""
    engine = make(block_size=1, num_blocks=64)
    assert [ask(engine, max_tokens=5), ask(engine, max_tokens=5)] == [0, 9]
    assert ask(engine, prompt=[*PROMPT, *expected_tokens(None, PROMPT, 5)]) == 14


def test_prompts_of_one_step_share_their_blocks(make: Make) -> None:
    engine = make()
    ids = [engine.submit(None, PROMPT, max_tokens=2) for _ in range(3)]
    engine.step()
    # Two blocks that are shared and one of each sequence.
    assert engine.core.stats().kv_blocks_used == 5
    engine.run()
    assert [engine.outcomes[i][0].cached_tokens for i in ids] == [0, 8, 8]


def test_completions_share_the_blocks_of_their_prompt(make: Make) -> None:
    engine = make()
    request_id = engine.submit(None, PROMPT, n=4, temperature=1.0, seed=7, max_tokens=4)
    engine.step()
    assert engine.core.stats().kv_blocks_used == 6
    engine.run()
    outcomes = engine.outcomes[request_id]
    assert [o.cached_tokens for o in outcomes] == [0, 8, 8, 8]
    assert [o.tokens for o in outcomes] == [
        expected_tokens(None, PROMPT, 4, seed=seed) for seed in (7, 8, 9, 10)
    ]


def test_a_chunk_of_a_prompt_is_found_while_the_rest_is_read(make: Make) -> None:
    engine = make(max_step_tokens=8)
    ids = [engine.submit(None, PROMPT, max_tokens=2) for _ in range(2)]
    engine.run()
    assert [engine.outcomes[i][0].cached_tokens for i in ids] == [0, 8]


def test_an_aborted_prompt_leaves_what_it_has_computed(make: Make) -> None:
    engine = make(max_step_tokens=5)
    request_id = engine.submit(None, PROMPT, max_tokens=2)
    engine.step()
    engine.abort(request_id)
    while engine.core.has_work:
        engine.step()
    assert ask(engine) >= 4


def test_prompt_logprobs_compute_every_token_and_leave_them_to_others(make: Make) -> None:
    engine = make()
    for _ in range(2):
        request_id = engine.submit(None, PROMPT, prompt_logprobs=1, max_tokens=2)
        engine.run()
        [outcome] = engine.outcomes[request_id]
        truth = expected_prompt_logprobs(None, PROMPT, 1)
        assert outcome.prompt_logprobs == [(None, *truth)]
        assert outcome.cached_tokens == 0
    assert found(engine) == (0, 0)
    assert ask(engine) == 8


# What is never found


def test_adapters_share_nothing_with_each_other_or_the_base(make: Make) -> None:
    engine = make(adapters=["a", "b"])
    assert [ask(engine, model) for model in (None, "a", "b")] == [0, 0, 0]
    assert [ask(engine, model) for model in (None, "a", "b")] == [8, 8, 8]


def test_salts_share_nothing_with_each_other(make: Make) -> None:
    engine = make()
    salts = (None, "x", "y")
    assert [ask(engine, cache_salt=salt) for salt in salts] == [0, 0, 0]
    assert [ask(engine, cache_salt=salt) for salt in salts] == [8, 8, 8]


def test_a_salt_is_not_empty(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt is empty"):
        make().submit(None, PROMPT, cache_salt="")


def test_new_bytes_under_an_old_name_find_nothing(make: Make) -> None:
    engine = make()
    engine.load("a", "old")
    assert ask(engine, "a") == 0
    engine.load("a", "new", replace=True)
    assert ask(engine, "a") == 0
    engine.load("a", "old", replace=True)
    assert ask(engine, "a") == 8


def test_the_same_bytes_under_two_names_share(make: Make) -> None:
    engine = make()
    engine.load("a", "one")
    engine.load("b", "one")
    assert [ask(engine, "a"), ask(engine, "b")] == [0, 8]


def test_an_adapter_that_was_evicted_or_unloaded_finds_its_blocks_again(make: Make) -> None:
    engine = make(num_slots=1, adapters=["a", "b"])
    assert [ask(engine, "a"), ask(engine, "b")] == [0, 0]
    assert engine.core.stats().slot_evictions == 1
    assert ask(engine, "a") == 8
    engine.unload("a")
    engine.load("a")
    assert ask(engine, "a") == 8


# Errors


def fail(engine: SmallEngine, prompt: list[int], *, steps: int = 0, abort: bool = False) -> None:
    """A request whose logits are not finite, after some steps; it may be aborted before that."""
    request_id = engine.submit(None, prompt, max_tokens=12)
    for _ in range(steps):
        engine.step()
    engine.worker.row_errors[engine.sequences[-1].request_id] = "not finite"
    if abort:
        engine.step()  # with the next step in flight, where the engine runs ahead
        engine.abort(request_id)
    while engine.core.has_work:
        engine.step()
    engine.worker.row_errors.clear()
    engine.check_idle()


@pytest.mark.parametrize("steps", range(8))
def test_a_sequence_that_failed_leaves_nothing(make: Make, steps: int) -> None:
    engine = make()
    fail(engine, PROMPT, steps=steps)
    assert ask(engine, max_tokens=1) == 0
    # Nor is anything left behind the blocks that have been computed again.
    assert ask(engine, prompt=[*PROMPT, *expected_tokens(None, PROMPT, 8)]) == 8


def test_what_a_sequence_found_before_it_failed_is_forgotten_too(make: Make) -> None:
    engine = make()
    assert ask(engine) == 0
    fail(engine, PROMPT)
    assert ask(engine) == 0
    assert ask(engine) == 8


def test_a_row_that_fails_after_its_request_was_aborted_leaves_nothing() -> None:
    engine = SmallEngine(runs_ahead=True, max_step_tokens=32)
    request_id = engine.submit(None, PROMPT, max_tokens=12)
    engine.step()
    engine.step()
    # The row that is launched in the next step fails, and nobody waits for it any more then.
    engine.worker.row_errors[engine.sequences[-1].request_id] = "not finite"
    engine.step()
    assert not engine.worker.row_errors
    engine.abort(request_id)
    engine.step()
    engine.check_idle()
    assert ask(engine) == 0


def test_others_go_on_with_blocks_that_are_forgotten(make: Make) -> None:
    engine = make()
    ids = [engine.submit(None, PROMPT, max_tokens=8) for _ in range(2)]
    engine.worker.row_errors[engine.sequences[0].request_id] = "not finite"
    engine.run()
    engine.check_idle()
    assert [engine.outcomes[i][0].finish_reason for i in ids] == ["error", "length"]
    assert engine.outcomes[ids[1]][0].tokens == expected_tokens(None, PROMPT, 8)


# Room


def test_kept_blocks_are_given_away_when_they_are_needed(make: Make) -> None:
    engine = make(num_blocks=8)
    ask(engine)
    assert engine.core.stats().kv_blocks_used == 0
    assert ask(engine, prompt=[50 + i for i in range(27)]) == 0
    assert ask(engine) < 8


@pytest.mark.parametrize(("length", "starts"), [(28, True), (29, False)])
def test_a_sequence_starts_when_there_is_room_behind_what_it_finds(
    make: Make, length: int, starts: bool
) -> None:
    # The first holds three of eight blocks. The second finds two of these and needs the other five
    # for 28 tokens.
    engine = make(num_blocks=8)
    first = engine.submit(None, PROMPT, max_tokens=6)
    engine.step()
    prompt = [*PROMPT[:8], *range(40, 32 + length)]
    second = engine.submit(None, prompt, max_tokens=2)
    engine.step()
    assert engine.core.stats().num_waiting == (not starts)
    engine.run()
    engine.check_idle()
    assert engine.outcomes[first][0].tokens == expected_tokens(None, PROMPT, 6)
    assert engine.outcomes[second][0].tokens == expected_tokens(None, prompt, 2)
    assert engine.outcomes[second][0].cached_tokens == 8


def test_a_preempted_sequence_finds_what_nobody_has_needed(make: Make) -> None:
    engine = make(num_blocks=8)
    prompts = [[i] * 12 for i in range(2)]
    ids = [engine.submit(None, prompt, max_tokens=8) for prompt in prompts]
    engine.run()
    stats = engine.core.stats()
    assert stats.preemptions >= 1
    for prompt, request_id in zip(prompts, ids, strict=True):
        assert engine.outcomes[request_id][0].tokens == expected_tokens(None, prompt, 8)
    # It lost one block, and read its prompt again from there; what it found is not counted twice.
    assert stats.prompt_tokens < 36
    assert (stats.prefix_queries, stats.prefix_hits) == (24, 0)
