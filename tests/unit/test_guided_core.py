"""Guides in the engine, over a worker without a model: who is asked, and how answers end."""

from __future__ import annotations

from typing import Any

import pytest

from loramux import Guide
from loramux.errors import AdapterReplaced, InvalidRequest
from loramux.guide import GuideFailed
from loramux.plan import PENDING_TOKEN, StepPlan
from loramux.testing import FakeWorker, expected_tokens
from loramux.types import GenerationRequest, SamplingParams
from tests.unit.small_engine import SmallEngine

PROMPT = [1, 2, 3, 4, 5]
TEXTS = ["!!!!!!!!", "!B!B!B!B", "BaBaBaBa", "a!Baa!Ba"]
"""Of tokens far apart, since the worker takes the next one that is allowed."""


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def runs_ahead(request: pytest.FixtureRequest) -> bool:
    return request.param


def guided(**how: Any) -> dict[str, Any]:
    return {"guide": Guide.choice(TEXTS), **how}


def test_an_answer_is_one_of_the_choices_and_ends_there(runs_ahead: bool) -> None:
    engine = SmallEngine(runs_ahead=runs_ahead)
    found = set()
    for first in range(20):
        request_id = engine.submit(None, [first, 7], **guided())
        engine.run()
        [outcome] = engine.outcomes[request_id]
        assert (outcome.finish_reason, outcome.stop_reason) == ("stop", None)
        assert "".join(map(chr, outcome.tokens)) == outcome.text
        found.add(outcome.text)
    assert found <= set(TEXTS)
    assert len(found) > 1
    engine.check_idle()


def test_completions_of_one_request_are_followed_apart(runs_ahead: bool) -> None:
    engine = SmallEngine(runs_ahead=runs_ahead)
    request_id = engine.submit(None, PROMPT, **guided(n=4, temperature=1.0, seed=1))
    engine.run()
    texts = [outcome.text for outcome in engine.outcomes[request_id]]
    assert set(texts) <= set(TEXTS)
    assert len(set(texts)) > 1


def test_rows_without_a_guide_answer_as_alone(runs_ahead: bool) -> None:
    engine = SmallEngine(runs_ahead=runs_ahead, adapters=["a"])
    plain = engine.submit(None, PROMPT, max_tokens=12)
    engine.submit("a", PROMPT, **guided())
    adapted = engine.submit("a", PROMPT, max_tokens=12)
    engine.submit(None, PROMPT, **guided())
    engine.run()
    assert engine.outcomes[plain][0].tokens == expected_tokens(None, PROMPT, 12)
    assert engine.outcomes[adapted][0].tokens == expected_tokens("a", PROMPT, 12)


def test_preempted_answers_go_on_where_they_were(runs_ahead: bool) -> None:
    def answers(num_blocks: int) -> tuple[list[str], int]:
        engine = SmallEngine(runs_ahead=runs_ahead, num_blocks=num_blocks, max_model_len=20)
        ids = [engine.submit(None, [first, 9, 9], **guided()) for first in range(4)]
        engine.run()
        engine.check_idle()
        return [engine.outcomes[i][0].text for i in ids], engine.core.stats().preemptions

    roomy, none = answers(32)
    tight, some = answers(6)
    assert (none, some > 0) == (0, True)
    assert tight == roomy
    assert set(roomy) <= set(TEXTS)


class Plans(FakeWorker):
    """Keeps what it was told."""

    plans: list[StepPlan]

    def launch(self, plan: StepPlan) -> Any:
        self.plans = [*getattr(self, "plans", ()), plan]
        return super().launch(plan)


def test_a_step_is_not_launched_ahead_of_a_token_that_a_guide_must_see() -> None:
    engine = SmallEngine(worker_type=Plans, runs_ahead=True)
    engine.submit(None, PROMPT, **guided())
    engine.run()
    assert isinstance(engine.worker, Plans)
    tokens = [t for plan in engine.worker.plans for s in plan.sequences for t in s.token_ids]
    assert PENDING_TOKEN not in tokens
    assert all(s.sample and s.sample.allowed for p in engine.worker.plans for s in p.sequences)


def test_max_tokens_cuts_an_answer_off() -> None:
    engine = SmallEngine()
    request_id = engine.submit(None, PROMPT, **guided(max_tokens=3))
    engine.run()
    [outcome] = engine.outcomes[request_id]
    assert outcome.finish_reason == "length"
    assert any(text.startswith(outcome.text) for text in TEXTS)
    assert len(outcome.text) == 3


def test_an_answer_that_just_fits_is_complete() -> None:
    engine = SmallEngine()
    request_id = engine.submit(None, PROMPT, **guided(max_tokens=8))
    engine.run()
    [outcome] = engine.outcomes[request_id]
    assert (outcome.finish_reason, outcome.text in TEXTS) == ("stop", True)


def test_a_stop_string_ends_an_answer_early() -> None:
    engine = SmallEngine()
    request_id = engine.submit(None, PROMPT, guide=Guide.choice(["ABCD"]), stop=["C"])
    engine.run()
    [outcome] = engine.outcomes[request_id]
    assert (outcome.text, outcome.finish_reason, outcome.stop_reason) == ("AB", "stop", "C")


def test_text_that_was_held_back_is_shown_when_the_answer_is_complete() -> None:
    engine = SmallEngine()
    request_id = engine.submit(None, PROMPT, guide=Guide.choice(["ABCD"]), stop=["DE"])
    engine.run()
    [outcome] = engine.outcomes[request_id]
    assert (outcome.text, outcome.finish_reason, outcome.stop_reason) == ("ABCD", "stop", None)


class Narrow:
    """A grammar that allows any token, and then only takes an A."""

    def matcher(self) -> Narrow:
        return self

    @property
    def allowed(self) -> bytes:
        return b"\xff" * 13

    def push(self, token_id: int) -> bool:
        if token_id != ord("A"):
            raise GuideFailed("this is no A")
        return False


@pytest.mark.parametrize(("max_tokens", "reason"), [(8, "error"), (1, "length")])
def test_an_answer_that_cannot_go_on_fails_alone(max_tokens: int, reason: str) -> None:
    engine = SmallEngine()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, guide=Guide.regex("A+"))
    request = GenerationRequest(prompt_token_ids=PROMPT, params=params)
    plain = engine.submit(None, PROMPT, max_tokens=12)
    deltas = []
    engine.core.add(engine.admission.admit(request, Narrow()))
    while engine.core.has_work:
        deltas += engine.core.step()
    [sick] = [d for d in deltas if d.request_id != plain]
    assert sick.finish_reason == reason
    assert sick.token_ids == (expected_tokens(None, PROMPT, 1)[0],)
    assert (sick.error is None) == (reason == "length")
    assert reason == "length" or "as its guide demands: this is no A" in str(sick.error)
    tokens = [t for d in deltas if d.request_id == plain for t in d.token_ids]
    assert tokens == expected_tokens(None, PROMPT, 12)


def test_a_refused_guide_holds_nothing() -> None:
    engine = SmallEngine(adapters=["a"])
    with pytest.raises(InvalidRequest, match="it is bad") as refused:
        engine.submit("a", PROMPT, guide=Guide.regex("bad", "guided_regex"))
    assert refused.value.param == "guided_regex"
    engine.check_idle()


def test_a_grammar_that_comes_with_the_request_is_not_made_again() -> None:
    engine = SmallEngine()
    params = SamplingParams(guide=Guide.regex("bad"))
    request = GenerationRequest(prompt_token_ids=PROMPT, params=params)
    [sequence] = engine.admission.admit(request, Narrow())
    assert isinstance(sequence.matcher, Narrow)


def test_a_guide_for_a_codec_that_is_gone_is_sent_back() -> None:
    params = SamplingParams(guide=Guide.regex("A"))
    request = GenerationRequest(prompt_token_ids=PROMPT, params=params, codec="of another")
    with pytest.raises(AdapterReplaced):
        SmallEngine().admission.admit(request)
