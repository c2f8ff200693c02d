"""Every conformance case through the engine: the right answer or a refusal, never anything else."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from loramux import LLM, SamplingParams
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SchedulerOptions
from loramux.errors import AdapterError, UnknownModel
from loramux.types import RequestOutput
from tests.conformance.cases import Case, Golden, load_cases
from tests.conformance.deferred import DECLINED, DEFERRED, is_deferred

TOLERANCE = 1e-3
NAME = "case"

CASES = load_cases()
NOT_SERVED = DEFERRED | DECLINED
REFUSED = [case for case in CASES if case.kind == "refuse" or case.name in NOT_SERVED]
ANSWERED = [case for case in CASES if case not in REFUSED and not case.rows]
BATCHES = [case for case in CASES if case.rows and not is_deferred(case.adapters)]


@functools.cache
def engine(base: Path) -> LLM:
    """One engine for each base, with steps so small that prompts are read in chunks."""
    return LLM(
        str(base),
        options=EngineOptions(
            model=ModelOptions(dtype="float32", threads=1),
            adapters=AdapterOptions(max_loras=16),
            scheduler=SchedulerOptions(max_num_seqs=24, max_step_tokens=24, kv_cache="16MiB"),
        ),
    )


def ask(llm: LLM, prompts: list[tuple[int, ...]], names: list[str | None]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
    return llm.generate(prompts, params, adapter=names)


def check(output: RequestOutput, golden: Golden) -> None:
    answer = output.completions[0]
    assert answer.token_ids == golden.tokens
    for got, wanted in zip(answer.logprobs, golden.logprobs, strict=True):
        assert abs(got.logprob - wanted) <= TOLERANCE


def check_base(llm: LLM, case: Case) -> None:
    """The base answers as ever, and the case's name does not exist."""
    pairs = [(p, g) for p, g in zip(case.prompts, case.base_golden, strict=True) if g is not None]
    for output, (_, golden) in zip(
        ask(llm, [p for p, _ in pairs], [None] * len(pairs)), pairs, strict=True
    ):
        check(output, golden)
    with pytest.raises(UnknownModel):
        ask(llm, [(1, 2, 3)], [NAME])


@pytest.mark.parametrize("case", ANSWERED, ids=lambda case: case.name)
def test_an_adapter_answers_as_peft_does(case: Case) -> None:
    llm = engine(case.base)
    assert case.adapter is not None
    llm.load_adapter(NAME, str(case.adapter))
    try:
        for output, golden in zip(
            ask(llm, list(case.prompts), [NAME] * len(case.prompts)), case.golden, strict=True
        ):
            check(output, golden)
    finally:
        llm.unload_adapter(NAME)
    check_base(llm, case)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_refused_adapter_leaves_the_base_as_it_was(case: Case) -> None:
    llm = engine(case.base)
    assert case.adapter is not None
    with pytest.raises(AdapterError):
        llm.load_adapter(NAME, str(case.adapter))
    check_base(llm, case)


@pytest.mark.parametrize("case", BATCHES, ids=lambda case: case.name)
def test_adapters_and_the_base_share_a_batch(case: Case) -> None:
    llm = engine(case.base)
    for name, directory in case.adapters.items():
        llm.load_adapter(name, str(directory))
    try:
        outputs = ask(llm, [row.prompt for row in case.rows], [row.adapter for row in case.rows])
        for output, row in zip(outputs, case.rows, strict=True):
            check(output, row.golden)
    finally:
        for name in case.adapters:
            llm.unload_adapter(name)
