"""Runs golden prompts through an engine and compares tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from loramux import LLM, SamplingParams
from loramux.types import Completion
from tests.golden.load import BASE, Golden

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)

Row = tuple[str, str]
"""Adapter name (or BASE) and prompt id."""


def all_rows(golden: Golden) -> list[Row]:
    """Every prompt for the base and every adapter, those of one prompt side by side."""
    return [(name, prompt) for prompt in golden.prompts for name in golden.outputs]


def run(
    llm: LLM, golden: Golden, rows: Sequence[Row], params: SamplingParams = GREEDY
) -> list[Completion]:
    """Answer all rows in one batch."""
    outputs = llm.generate(
        [golden.prompts[prompt].input_ids for _, prompt in rows],
        params,
        adapter=[None if name == BASE else name for name, _ in rows],
    )
    return [output.completions[0] for output in outputs]


def check(
    golden: Golden, rows: Sequence[Row], answers: Sequence[Completion], tolerance: float
) -> None:
    """Assert that every row has the golden tokens and, within ``tolerance``, their likelihoods."""
    for (name, prompt), answer in zip(rows, answers, strict=True):
        expected = golden.outputs[name][prompt]
        assert answer.token_ids == expected.output_ids, f"{name} on {prompt}"
        for got, wanted in zip(answer.logprobs, expected.logprobs, strict=True):
            assert abs(got.logprob - wanted) <= tolerance, f"{name} on {prompt}"
