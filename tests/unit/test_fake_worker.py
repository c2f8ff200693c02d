"""The fake worker takes no wrong order, least of all from an engine that runs ahead."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.plan import PENDING_TOKEN, Sample, SequenceStep, StepPlan
from loramux.testing import FakeWorker, expected_tokens
from loramux.types import RequestId, SamplingParams, Slot

PROMPT = [1, 2, 3]
GREEDY = SamplingParams(temperature=0)


def worker(*, runs_ahead: bool = True) -> FakeWorker:
    return FakeWorker(
        num_slots=1,
        num_blocks=4,
        block_size=4,
        arena_bytes=1,
        max_num_seqs=4,
        max_step_tokens=8,
        runs_ahead=runs_ahead,
    )


def prompt(name: str = "r", block: int = 0) -> SequenceStep:
    sample = Sample(GREEDY, 0, PROMPT, num_prompt_tokens=3, position=0)
    return SequenceStep(RequestId(name), PROMPT, 0, [block], Slot(1), sample)


def pending(name: str = "r", **changed: Any) -> SequenceStep:
    """What follows ``prompt`` before its token is known."""
    sample = Sample(**{"params": GREEDY, "seed": 0, "tokens": PROMPT, "num_prompt_tokens": 3,
                       "position": 1, **changed})  # fmt: skip
    return SequenceStep(RequestId(name), [PENDING_TOKEN], 3, [0], Slot(1), sample)


def plan(*sequences: SequenceStep) -> StepPlan:
    return StepPlan((), sequences)


def test_a_pending_token_is_the_one_that_the_step_before_samples() -> None:
    fake = worker()
    steps = [fake.launch(plan(prompt())), fake.launch(plan(pending()))]
    tokens = [step.result().sequences[0].token_id for step in steps]
    assert tokens == expected_tokens(None, PROMPT, 2)


def test_results_are_handed_out_once() -> None:
    step = worker().launch(plan(prompt()))
    step.result()
    with pytest.raises(AssertionError, match="twice"):
        step.result()


def test_results_are_handed_out_in_turn() -> None:
    fake = worker()
    fake.launch(plan(prompt()))
    second = fake.launch(plan(pending()))
    with pytest.raises(AssertionError, match="out of turn"):
        second.result()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_no_more_steps_than_agreed_are_outstanding(runs_ahead: bool) -> None:
    fake = worker(runs_ahead=runs_ahead)
    for block in range(1 + runs_ahead):
        fake.launch(plan(prompt(block=block)))
    with pytest.raises(AssertionError, match="at once"):
        fake.launch(plan(prompt(block=3)))


def test_a_token_cannot_be_pending_that_no_step_samples() -> None:
    with pytest.raises(AssertionError, match="samples no such token"):
        worker().launch(plan(pending()))


def test_a_token_cannot_be_pending_for_longer_than_a_step() -> None:
    fake = worker()
    fake.launch(plan(prompt())).result()
    fake.launch(plan(prompt("other", block=1)))
    with pytest.raises(AssertionError, match="samples no such token"):
        fake.launch(plan(pending()))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"position": 0}, "wrong place in the output"),
        ({"tokens": [1, 2]}, "tokens are missing"),
        ({"tokens": [1, 2, 4]}, "not those of the cache"),
        ({"params": SamplingParams(presence_penalty=1.0)}, "penalties"),
        ({"forbidden": (7,)}, "forbidden"),
        ({"allowed": b"\x01"}, "guide allows"),
    ],
    ids=str,
)
def test_a_sample_must_fit_a_pending_token(changed: dict[str, Any], error: str) -> None:
    fake = worker()
    fake.launch(plan(prompt()))
    with pytest.raises(AssertionError, match=error):
        fake.launch(plan(pending(**changed)))


def test_a_pending_token_stands_alone() -> None:
    fake = worker()
    fake.launch(plan(prompt()))
    beside = pending()._replace(token_ids=[3, PENDING_TOKEN], start=2)
    with pytest.raises(AssertionError, match="beside others"):
        fake.launch(plan(beside))


def test_sequences_of_a_step_write_into_no_common_block() -> None:
    with pytest.raises(AssertionError, match="write into one block"):
        worker().launch(plan(prompt("r"), prompt("s")))
