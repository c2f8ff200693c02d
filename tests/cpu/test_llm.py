"""The offline engine over a worker without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loramux.config import StepLimits
from loramux.engine.build import Parts
from loramux.engine.llm import LLM
from loramux.errors import EngineStopped, InvalidRequest, UnknownModel
from loramux.testing import expected_tokens
from loramux.types import SamplingParams
from tests.unit.small_engine import SmallEngine

PROMPTS = [[1, 2, 3], [4], [5] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(params=[False, True], ids=["waits", "runs-ahead"])
def small(request: pytest.FixtureRequest) -> SmallEngine:
    return SmallEngine(runs_ahead=request.param)


@pytest.fixture
def llm(small: SmallEngine, tmp_path: Path) -> LLM:
    """With the adapters ``a`` and ``b``."""
    for name in "ab":
        (tmp_path / name).mkdir()
    fakes: Any = (small.worker, small.admission, small.languages)
    adapters = {name: str(tmp_path / name) for name in "ab"}
    return LLM.over(Parts(small.core, *fakes, "base", StepLimits(4, 8), "shape"), adapters)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 1, 5)]
    tokens = [output.completions[0].token_ids for output in llm.generate(PROMPTS, params)]
    assert tokens == [
        tuple(expected_tokens(None, p, n)) for p, n in zip(PROMPTS, (9, 1, 5), strict=True)
    ]


def test_each_prompt_can_have_its_adapter(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, adapter=["a", None, "b"])
    assert [output.completions[0].token_ids for output in outputs] == [
        tuple(expected_tokens(a, p, 4)) for a, p in zip(("a", None, "b"), PROMPTS, strict=True)
    ]


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    (output,) = llm.generate([1, 2, 3], GREEDY)
    assert output.prompt_token_ids == (1, 2, 3)


def test_text_is_encoded_and_decoded(llm: LLM) -> None:
    (output,) = llm.generate("A", GREEDY)
    assert output.text == "".join(map(chr, expected_tokens(None, [65], 4)))


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_lists_must_be_as_long_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        llm.generate(PROMPTS, GREEDY, adapter=["a", "b"])


def test_a_refused_prompt_runs_nothing_and_holds_nothing(llm: LLM, small: SmallEngine) -> None:
    with pytest.raises(UnknownModel):
        llm.generate(PROMPTS, GREEDY, adapter=["a", "b", "c"])
    assert llm.stats().num_steps == 0
    small.check_idle()


def test_a_failed_step_is_raised_and_no_answer_is_given_from_then_on(
    llm: LLM, small: SmallEngine
) -> None:
    small.worker.failure = RuntimeError("the device is lost")
    with pytest.raises(RuntimeError, match="the device is lost"):
        llm.generate(PROMPTS, GREEDY, adapter="a")
    small.worker.failure = None
    with pytest.raises(EngineStopped, match="the device is lost"):
        llm.generate(PROMPTS, GREEDY, adapter="a")
    small.check_idle()
