"""Runs golden prompts through an engine and compares tokens and log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from loramux import LLM, SamplingParams
from loramux.types import Completion
from tests.golden.load import BASE, Golden, GoldenOutput

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
TIE = 1e-4
"""Of a logit: what rounding alone moves. One place of the golden outputs has a lead of 0.00000."""

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


def check(llm: LLM, golden: Golden, rows: Sequence[Row], tolerance: float) -> None:
    """Assert that each row of one batch has the golden tokens and, about, their likelihoods.

    Where two tokens are equally likely to the last digits (a lead under TIE), either may come; the
    rest of the golden answer is then asked for after the golden token.
    """
    for row, answer in zip(rows, run(llm, golden, rows), strict=True):
        expected = golden.outputs[row[0]][row[1]]
        start = 0
        while (place := _differs(answer, expected, start)) is not None:
            assert expected.lead[place] < TIE, f"{row} differs at {place}, which is no tie"
            _check_likelihoods(answer, expected, start, place, tolerance)
            start = place + 1
            if start == len(expected.output_ids):
                break
            answer = _go_on(llm, golden, row, expected.output_ids[:start])
        else:
            _check_likelihoods(answer, expected, start, len(expected.output_ids), tolerance)


def check_forced(llm: LLM, golden: Golden, rows: Sequence[Row], tolerance: float) -> None:
    """Assert that the golden answers, given as prompts, are about as likely as they were.

    For dtypes in which near ties fall either way, so that tokens cannot be compared.
    """
    outputs = llm.generate(
        [[*golden.prompts[p].input_ids, *golden.outputs[name][p].output_ids] for name, p in rows],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        adapter=[None if name == BASE else name for name, _ in rows],
    )
    for row, output in zip(rows, outputs, strict=True):
        expected = golden.outputs[row[0]][row[1]].logprobs
        assert output.prompt_logprobs is not None
        tail = output.prompt_logprobs[-len(expected) :]
        for entry, wanted in zip(tail, expected, strict=True):
            assert entry is not None
            assert abs(entry.logprob - wanted) <= tolerance, f"{row}"


def _differs(answer: Completion, expected: GoldenOutput, start: int) -> int | None:
    """The first place, of those from ``start`` on, where ``answer`` has another token."""
    wanted = expected.output_ids[start:]
    pairs = itertools.zip_longest(answer.token_ids, wanted)
    return next((start + i for i, (got, want) in enumerate(pairs) if got != want), None)


def _check_likelihoods(
    answer: Completion, expected: GoldenOutput, start: int, end: int, tolerance: float
) -> None:
    for got, wanted in zip(answer.logprobs, expected.logprobs[start:end], strict=False):
        assert abs(got.logprob - wanted) <= tolerance


def _go_on(llm: LLM, golden: Golden, row: Row, tokens: tuple[int, ...]) -> Completion:
    """The rest of an answer that begins with ``tokens``."""
    params = replace(GREEDY, max_tokens=MAX_TOKENS - len(tokens))
    prompt = [*golden.prompts[row[1]].input_ids, *tokens]
    [output] = llm.generate([prompt], params, adapter=None if row[0] == BASE else row[0])
    return output.completions[0]
