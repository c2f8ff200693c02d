"""Embeddings in an engine: a vector for each prompt, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.errors import InvalidRequest
from loramux.plan import HiddenPart, StepPlan
from loramux.testing import FakeWorker, expected_embedding
from loramux.testing.worker import FakeLaunchedStep
from loramux.types import PoolingParams, RequestId
from tests.unit.small_engine import Outcome, SmallEngine

KINDS = [
    {"pooling": pooling, "normalize": normalize}
    for pooling in ("last", "mean")
    for normalize in (True, False)
]
LONG = [(7 * i + 3) % 100 for i in range(21)]


class NotingWorker(FakeWorker):
    """Notes which hidden states each step is asked for."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.asked: list[list[HiddenPart | None]] = []

    def launch(self, plan: StepPlan) -> FakeLaunchedStep:
        self.asked.append([s.hidden for s in plan.sequences])
        return super().launch(plan)


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def engine(request: pytest.FixtureRequest) -> SmallEngine:
    return SmallEngine(runs_ahead=request.param, adapters="ab")


def outcome(engine: SmallEngine, request_id: RequestId) -> Outcome:
    [found] = engine.outcomes[request_id]
    return found


def assert_right(
    engine: SmallEngine, request_id: RequestId, model: str | None, prompt: list[int], kind: Any
) -> None:
    found = outcome(engine, request_id)
    assert found.finish_reason == "stop"
    assert (found.tokens, found.text) == ([], "")
    assert found.embedding == pytest.approx(expected_embedding(model, prompt, **kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("prompt", [[5], [1, 2, 3, 4], LONG], ids=len)
def test_vectors_are_right_beside_sequences_that_generate(
    engine: SmallEngine, prompt: list[int], kind: dict[str, Any]
) -> None:
    answers = [engine.submit(model, [9, 8, 7], max_tokens=6) for model in ("a", None)]
    ids = {model: engine.embed(model, prompt, **kind) for model in ("a", "b", None)}
    engine.run()
    for model, request_id in ids.items():
        assert_right(engine, request_id, model, prompt, kind)
    for model, request_id in zip(("a", None), answers, strict=True):
        expected = engine.expected(model, [9, 8, 7], max_tokens=6)
        assert outcome(engine, request_id).tokens == expected.tokens
    engine.check_idle()


def test_it_ends_with_the_step_that_reads_its_last_token() -> None:
    engine = SmallEngine(max_step_tokens=8)
    request_id = engine.embed(None, LONG)
    deltas = [len(engine.step()) for _ in range(3)]
    assert deltas == [0, 0, 1]
    assert outcome(engine, request_id).finish_reason == "stop"
    assert engine.core.stats().output_tokens == 0
    assert engine.core.stats().prompt_tokens == len(LONG)
    engine.check_idle()


@pytest.mark.parametrize(
    ("pooling", "asked"), [("last", [None, None, "last"]), ("mean", ["sum", "sum", "sum"])]
)
def test_no_more_is_asked_of_a_step_than_is_needed(pooling: str, asked: list[Any]) -> None:
    engine = SmallEngine(max_step_tokens=8, worker_type=NotingWorker)
    engine.embed(None, LONG, pooling=pooling)
    engine.run()
    assert isinstance(engine.worker, NotingWorker)
    assert engine.worker.asked == [[part] for part in asked]


def test_a_prompt_may_fill_the_context(engine: SmallEngine) -> None:
    prompt = [i % 100 for i in range(engine.max_model_len)]
    request_id = engine.embed("a", prompt)
    engine.run()
    assert_right(engine, request_id, "a", prompt, {})
    with pytest.raises(InvalidRequest, match="shorten it to 32 or less"):
        engine.embed("a", [*prompt, 1])


@pytest.mark.parametrize("prompt", [[], [100], [-1]])
def test_what_is_no_prompt_is_refused_and_holds_nothing(
    engine: SmallEngine, prompt: list[int]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.embed("a", prompt)
    assert refused.value.param == "prompt"
    engine.check_idle()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_that_is_preempted_is_computed_again(engine: SmallEngine, kind: dict[str, Any]) -> None:
    """Blocks run out while its prompt is read, in chunks that are others the second time."""
    engine = SmallEngine(
        runs_ahead=engine.worker.runs_ahead, num_blocks=9, max_step_tokens=6, adapters="a"
    )
    first = [engine.submit("a", [i, 4], max_tokens=12) for i in range(2)]
    engine.step()
    request_id = engine.embed("a", LONG, **kind)
    engine.run()
    [sequence] = [s for s in engine.sequences if s.parent_id == request_id]
    assert sequence.num_preemptions > 0
    assert_right(engine, request_id, "a", LONG, kind)
    for i, other in enumerate(first):
        expected = engine.expected("a", [i, 4], max_tokens=12)
        assert outcome(engine, other).tokens == expected.tokens
    engine.check_idle()


@pytest.mark.parametrize(("pooling", "found"), [("last", 20), ("mean", 0)])
def test_what_others_have_computed_serves_for_the_last_state_alone(
    engine: SmallEngine, pooling: str, found: int
) -> None:
    engine.embed("a", LONG)
    engine.run()
    asked = engine.core.stats().prefix_queries
    request_id = engine.embed("a", LONG, pooling=pooling)
    engine.run()
    assert outcome(engine, request_id).cached_tokens == found
    assert engine.core.stats().prefix_queries - asked == (len(LONG) if found else 0)
    assert_right(engine, request_id, "a", LONG, {"pooling": pooling})


def test_others_find_what_it_has_computed(engine: SmallEngine) -> None:
    engine.embed("a", LONG, pooling="mean")
    engine.run()
    request_id = engine.submit("a", LONG, max_tokens=2)
    engine.run()
    assert outcome(engine, request_id).cached_tokens == 20
    assert outcome(engine, request_id).tokens == engine.expected("a", LONG, max_tokens=2).tokens


def test_salts_keep_them_apart(engine: SmallEngine) -> None:
    for salt, found in (("x", 0), (None, 0), ("x", 20)):
        request_id = engine.embed("a", LONG, cache_salt=salt)
        engine.run()
        assert outcome(engine, request_id).cached_tokens == found


def test_an_abort_ends_it(engine: SmallEngine) -> None:
    request_id = engine.embed("a", LONG)
    engine.step()
    engine.abort(request_id)
    assert outcome(engine, request_id).finish_reason == "abort"
    assert outcome(engine, request_id).embedding is None
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_states_that_are_not_finite_end_it_and_are_found_by_nobody(
    engine: SmallEngine, pooling: str
) -> None:
    request_id = engine.embed("a", LONG, pooling=pooling)
    [sequence] = engine.sequences
    engine.worker.row_errors[sequence.request_id] = "not finite"
    other = engine.embed("a", LONG)
    engine.run()
    assert outcome(engine, request_id).finish_reason == "error"
    assert outcome(engine, request_id).error == "not finite"
    again = engine.embed("a", LONG)
    engine.run()
    assert outcome(engine, again).embedding == outcome(engine, other).embedding
    engine.check_idle()


@pytest.mark.parametrize(
    ("field", "value"),
    [("pooling", "cls"), ("pooling", None), ("normalize", 1), ("normalize", None)],
)
def test_params_name_what_is_wrong_with_them(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be") as refused:
        PoolingParams(**{field: value})
    assert refused.value.param == field
