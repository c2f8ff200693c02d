"""The engine over the Triton kernels: golden answers of every adapter in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loramux import LLM, SamplingParams
from loramux.config import EngineOptions, ModelOptions, SchedulerOptions
from tests.golden.load import BASE, Golden
from tests.kernels.backends import called_backends

TOLERANCE = 1e-3
NEW_TOKENS = 24 if torch.cuda.is_available() else 4  # the interpreter is slow


def test_all_adapters_mixed_answer_as_peft_does(
    tiny_base: Path,
    tiny_adapters: dict[str, Path],
    tiny_golden: Golden,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loramux.engine.build.choose_backends", called_backends)
    llm = LLM(
        str(tiny_base),
        adapters={name: str(path) for name, path in tiny_adapters.items()},
        options=EngineOptions(
            model=ModelOptions(dtype="float32"),
            scheduler=SchedulerOptions(max_num_seqs=16, max_step_tokens=64),
        ),
    )
    rows = [(name, prompt) for prompt in ("0", "1") for name in tiny_golden.outputs]
    outputs = llm.generate(
        [tiny_golden.prompts[prompt].input_ids for _, prompt in rows],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0),
        adapter=[None if name == BASE else name for name, _ in rows],
    )
    for (name, prompt), output in zip(rows, outputs, strict=True):
        expected = tiny_golden.outputs[name][prompt]
        answer = output.completions[0]
        assert answer.token_ids == expected.output_ids[:NEW_TOKENS], f"{name} on {prompt}"
        for got, wanted in zip(answer.logprobs, expected.logprobs, strict=False):
            assert abs(got.logprob - wanted) <= TOLERANCE, f"{name} on {prompt}"
    assert llm.stats().max_step_adapters == len(tiny_adapters)
