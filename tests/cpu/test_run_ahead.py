"""A tiny model answers the same whether the engine runs ahead or waits for each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loramux import LLM, SamplingParams
from loramux.engine.build import Parts
from loramux.plan import PENDING_TOKEN, StepPlan
from loramux.testing import random_adapter, tiny_model
from loramux.types import RequestOutput
from loramux.worker.launched import LaunchedStep
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS

PROMPTS = [[(29 * i + 7 * j + 3) % 160 for i in range(3 + 6 * j)] for j in range(4)]
ADAPTERS = [None, "one", "two"]
ROWS = [(prompt, adapter) for prompt in PROMPTS for adapter in ADAPTERS]


def engine(*, runs_ahead: bool, kv_blocks: int | None, max_loras: int) -> Parts:
    return assemble_tiny(
        tiny_model(),
        runs_ahead=runs_ahead,
        kv_blocks=kv_blocks,
        max_loras=max_loras,
        max_num_seqs=5,
        max_step_tokens=11,
    )


def count_pending(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each launch have a pending token, from now on."""
    counts: list[int] = []
    launch = parts.worker.launch

    def counted(plan: StepPlan) -> LaunchedStep:
        counts.append(sum(list(s.token_ids) == [PENDING_TOKEN] for s in plan.sequences))
        return launch(plan)

    monkeypatch.setattr(parts.worker, "launch", counted)
    return counts


def answers(outputs: Sequence[RequestOutput]) -> list[list[tuple[object, ...]]]:
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.completions]
        for output in outputs
    ]


def likelihoods(outputs: Sequence[RequestOutput]) -> list[float]:
    entries = [e for o in outputs for c in o.completions for e in c.logprobs]
    return [e.logprob for e in entries] + [
        e.logprob for o in outputs for e in o.prompt_logprobs or () if e is not None
    ]


PARAMS = {
    "greedy": [SamplingParams(temperature=0, max_tokens=24, logprobs=2)],
    "drawn": [SamplingParams(temperature=0.9, top_p=0.9, n=2, seed=5, max_tokens=24, logprobs=0)],
    "stopped": [SamplingParams(temperature=0, stop_token_ids=tuple(range(0, 160, 23)))],
    "all kinds": [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3),
        SamplingParams(temperature=1, seed=1, max_tokens=20, min_tokens=4, stop=("7", "3")),
        SamplingParams(temperature=0.7, seed=2, max_tokens=3, prompt_logprobs=1),
    ],
}


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(("kv_blocks", "max_loras"), [(None, 4), (9, 1)], ids=["room", "tight"])
def test_running_ahead_changes_no_answer(
    kind: str,
    kv_blocks: int | None,
    max_loras: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [PARAMS[kind][i % len(PARAMS[kind])] for i in range(len(ROWS))]
    found: list[list[RequestOutput]] = []
    for runs_ahead in (False, True):
        parts = engine(runs_ahead=runs_ahead, kv_blocks=kv_blocks, max_loras=max_loras)
        layout = parts.worker._anatomy.layout
        folders = {
            name: str(random_adapter(tmp_path / name, layout, rank=4, targets=TARGETS, seed=seed))
            for seed, name in enumerate(("one", "two"))
        }
        llm = LLM.over(parts, folders)
        pending = count_pending(parts, monkeypatch)
        prompts, adapters = [p for p, _ in ROWS], [a for _, a in ROWS]
        found.append(llm.generate(prompts, params, adapter=adapters))
        assert (sum(pending) > 0) == runs_ahead
        assert (llm.stats().preemptions > 0) == (kv_blocks is not None)
        parts.core.check()
    waited, ahead = found
    assert answers(ahead) == answers(waited)
    assert likelihoods(ahead) == pytest.approx(likelihoods(waited), abs=1e-4)
