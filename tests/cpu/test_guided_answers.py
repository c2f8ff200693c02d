"""Answers by guides, from a trained tiny model and its adapters: what they say, how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loramux import LLM, Guide, SamplingParams
from loramux.config import EngineOptions, ModelOptions
from loramux.engine.build import assemble, load_tokenizer
from loramux.errors import InvalidRequest
from loramux.model.load import load_base
from loramux.types import Completion
from tests.cpu.architectures import build
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_adapter_text import added, grown_tokenizer
from tests.cpu.test_golden_tiny import engine
from tests.cpu.test_grown_vocabulary import KINDS, write

PROMPT = "Alice was beginning to get very tired"
CHOICES = ["the Queen", "the cat", "Alice", "a very long sigh"]
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99},
    "minItems": 1,
    "maxItems": 2,
}


def is_list_of_numbers(text: str) -> bool:
    """No strings: the model has no quotation mark of JSON."""
    found = json.loads(text)
    return 1 <= len(found) <= 2 and all(type(n) is int and 0 <= n <= 99 for n in found)


GUIDES: dict[str, tuple[Guide, Callable[[str], object]]] = {
    "choice": (Guide.choice(CHOICES), CHOICES.__contains__),
    "regex": (
        Guide.regex("[a-z]{2,9} (said|cried) [a-z ]{3,12}[.]"),
        lambda text: re.fullmatch("[a-z]{2,9} (said|cried) [a-z ]{3,12}[.]", text),
    ),
    "json": (Guide.json(NUMBERS), is_list_of_numbers),
    "grammar": (
        Guide.grammar('start: "(" ("(" word ")" | word) ")"\nword: /[a-z]{1,6}/'),
        lambda text: re.fullmatch(r"\([a-z]{1,6}\)|\(\([a-z]{1,6}\)\)", text),
    ),
}
WAYS = {"greedy": SamplingParams(temperature=0.0), "drawn": SamplingParams(seed=7, top_p=0.95)}

Row = tuple[str | None, str | None]
"""Adapter and guide; None is the base, and no guide."""


def params_of(guide: str | None, way: str, **how: object) -> SamplingParams:
    made = None if guide is None else GUIDES[guide][0]
    return replace(WAYS[way], guide=made, max_tokens=110 if guide else 16, **how)  # type: ignore[arg-type]


def run(llm: LLM, rows: list[Row], way: str, **how: object) -> list[Completion]:
    outputs = llm.generate(
        [PROMPT] * len(rows),
        [params_of(guide, way, **how) for _, guide in rows],
        adapter=[adapter for adapter, _ in rows],
    )
    return [output.completions[0] for output in outputs]


@pytest.fixture(scope="module")
def llm(tiny_base: Path, tiny_adapters: dict[str, Path]) -> LLM:
    return engine(tiny_base, tiny_adapters)


def rows_of(tiny_adapters: dict[str, Path]) -> list[Row]:
    """Every guide and none, for the base and each adapter, all mixed."""
    adapters = [None, *tiny_adapters]
    return [(adapter, guide) for guide in (*GUIDES, None) for adapter in adapters]


def check_answer(guide: str, answer: Completion) -> None:
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None), answer.text
    assert GUIDES[guide][1](answer.text), answer.text


@pytest.mark.parametrize("way", WAYS)
def test_answers_of_one_mixed_batch_keep_to_their_guides(
    llm: LLM, tiny_adapters: dict[str, Path], way: str
) -> None:
    rows = rows_of(tiny_adapters)
    answers = run(llm, rows, way)
    for (_, guide), answer in zip(rows, answers, strict=True):
        if guide is not None:
            check_answer(guide, answer)
    assert len({answer.text for answer in answers}) > len(GUIDES) + len(tiny_adapters)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_answers_alone_as_beside_others(
    llm: LLM, tiny_adapters: dict[str, Path], way: str
) -> None:
    rows = rows_of(tiny_adapters)
    together = run(llm, rows, way)
    for place in range(0, len(rows), 4):
        [alone] = run(llm, [rows[place]], way)
        assert alone.token_ids == together[place].token_ids


@pytest.mark.parametrize("way", WAYS)
def test_base_rows_without_a_guide_keep_every_bit_beside_guided_ones(llm: LLM, way: str) -> None:
    """The neighbours are as many at each step, since the guides are of answers that do not end."""
    plain = params_of(None, way, logprobs=5)
    guides = [
        Guide.regex("[a-z ]{300}"),
        Guide.choice(["the cat " * 40]),
        Guide.json({**NUMBERS, "minItems": 50, "maxItems": 60}),
        Guide.grammar('start: "(" ~ 300 "a"'),
    ]

    def answers(others: list[SamplingParams]) -> object:
        outputs = llm.generate([PROMPT] * (3 + len(others)), [plain] * 3 + others)
        assert {output.completions[0].finish_reason for output in outputs} == {"length"}
        return [(o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs[:3]]

    guided = [replace(plain, guide=guide) for guide in guides]
    assert answers(guided) == answers([plain] * len(guides))


def test_completions_of_one_request_each_keep_to_the_guide(llm: LLM) -> None:
    guide, is_right = GUIDES["regex"]
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=60, guide=guide)
    [output] = llm.generate([PROMPT], params)
    texts = [completion.text for completion in output.completions]
    assert all(is_right(text) for text in texts)
    assert len(set(texts)) > 1


def test_too_few_blocks_preempt_and_the_answers_stay(
    llm: LLM, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    # Nine blocks of 8 KiB: one sequence of the greatest length and a little more.
    tight = engine(tiny_base, tiny_adapters, kv_cache=str(9 * 16 * 4 * 2 * 2 * 32 * 4))
    rows = rows_of(tiny_adapters)
    found = run(tight, rows, "drawn")
    assert tight.stats().preemptions > 0
    assert [a.token_ids for a in found] == [a.token_ids for a in run(llm, rows, "drawn")]


def test_steps_that_run_ahead_change_no_answer(
    llm: LLM, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    options = EngineOptions(model=ModelOptions(dtype="float32"))
    model = load_base(str(tiny_base), options.model)
    parts = assemble(model, load_tokenizer(str(tiny_base)), options, "tiny", runs_ahead=True)
    ahead = LLM.over(parts, {name: str(path) for name, path in tiny_adapters.items()})
    rows = rows_of(tiny_adapters)
    assert [a.token_ids for a in run(ahead, rows, "drawn")] == [
        a.token_ids for a in run(llm, rows, "drawn")
    ]


def test_max_tokens_cuts_an_answer_off(llm: LLM) -> None:
    guide = Guide.choice(["a very long sigh"])
    whole, cut = llm.generate(
        [PROMPT] * 2, [SamplingParams(guide=guide, max_tokens=n) for n in (50, 3)]
    )
    assert (whole.text, whole.completions[0].finish_reason) == ("a very long sigh", "stop")
    assert cut.completions[0].finish_reason == "length"
    assert whole.text.startswith(cut.text)
    assert len(cut.completions[0].token_ids) == 3


def test_an_answer_may_end_where_more_could_follow(llm: LLM) -> None:
    """It ends by a token of its own then, whose text is not shown."""
    guide = Guide.regex("a?b?c?")
    params = [SamplingParams(guide=guide, seed=i, temperature=100.0) for i in range(40)]
    answers = [output.completions[0] for output in llm.generate([PROMPT] * 40, params)]
    assert all(re.fullmatch("a?b?c?", answer.text) for answer in answers)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    ended = [answer for answer in answers if answer.token_ids[-1] == 3]
    assert 0 < len(ended) < len(answers)


def test_an_answer_that_no_token_goes_on_with_is_an_error_of_its_own(llm: LLM) -> None:
    guides = [Guide.regex("[ab]é"), GUIDES["choice"][0], None]
    sick, guided, plain = llm.generate(
        [PROMPT] * 3, [SamplingParams(guide=g, temperature=0, max_tokens=16) for g in guides]
    )
    assert sick.completions[0].finish_reason == "error"
    assert sick.text in ("a", "b")
    assert guided.text in CHOICES
    assert plain.completions[0].token_ids == run(llm, [(None, None)], "greedy")[0].token_ids


@pytest.mark.parametrize(
    "guide", [Guide.json({"type": "strng"}), Guide.regex("(a"), Guide.choice(["é"])], ids=str
)
def test_a_guide_that_cannot_be_followed_runs_nothing(llm: LLM, guide: Guide) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(InvalidRequest, match="guide cannot be followed"):
        llm.generate([PROMPT] * 2, [SamplingParams(), SamplingParams(guide=guide)])
    assert llm.stats().num_steps == steps
    assert all(info.in_flight == 0 for info in llm.adapters())


def test_an_adapter_with_tokens_of_its_own_is_guided_by_its_own_tokenizer(tmp_path: Path) -> None:
    write(KINDS["modules_to_save"], tmp_path / "grown")
    grown_tokenizer(164).save_pretrained(tmp_path / "grown")
    parts = assemble_tiny(build("llama"))
    llm = LLM.over(parts, {"grown": str(tmp_path / "grown")})
    guide = Guide.choice([f"7{added(161)}31{added(163)}", f"5{added(160)}"])
    params = SamplingParams(temperature=0, guide=guide)
    other = SamplingParams(temperature=0, guide=Guide.regex("(1[0-9]){3}"))
    own, base = llm.generate([[5, 31]] * 2, [params, other], adapter=["grown", None])
    assert own.text in guide.choices()
    assert set(own.completions[0].token_ids) & {160, 161}
    assert re.fullmatch("(1[0-9]){3}", base.text)
    with pytest.raises(InvalidRequest, match="no token of the model's vocabulary"):
        llm.generate([[5, 31]], SamplingParams(guide=Guide.choice([added(161)])))
