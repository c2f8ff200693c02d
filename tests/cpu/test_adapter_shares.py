"""A tiny model whose adapters have shares: one that floods the queue leaves the other its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux import LLM, SamplingParams
from loramux.engine.build import Parts
from loramux.testing import random_adapter, tiny_model
from loramux.types import GenerationRequest, RequestId
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS

NUM_FLOOD, NUM_FEW = 40, 4
PROMPT = [3, 17, 40, 8, 91]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def engine(folder: Path, weights: str | None, *, runs_ahead: bool = False) -> Parts:
    """A tiny engine with room for four sequences, and the adapters ``a`` and ``b``."""
    parts = assemble_tiny(
        tiny_model(),
        max_num_seqs=4,
        adapter_weights=weights,
        base_alias="me",
        runs_ahead=runs_ahead,
    )
    layout = parts.worker.layout
    sources = {
        name: str(random_adapter(folder / name, layout, rank=4, targets=TARGETS, seed=seed))
        for seed, name in enumerate("ab")
    }
    LLM.over(parts, sources)
    return parts


def send(parts: Parts, model: str | None, count: int) -> list[RequestId]:
    ids = []
    for number in range(count):
        request = GenerationRequest(prompt_token_ids=[*PROMPT, number], params=PARAMS, model=model)
        sequences = parts.admission.admit(request)
        parts.core.add(sequences)
        ids.append(sequences[0].parent_id)
    return ids


def ends(parts: Parts) -> list[RequestId]:
    """Run to the end; the requests in order of their ends."""
    ended = []
    while parts.core.has_work:
        ended += [d.request_id for d in parts.core.step() if d.finish_reason is not None]
    return ended


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_who_comes_after_a_flood_has_its_share_at_once(tmp_path: Path, runs_ahead: bool) -> None:
    parts = engine(tmp_path, "a=1,b=1", runs_ahead=runs_ahead)
    flood = send(parts, "a", NUM_FLOOD)
    parts.core.step()
    few = send(parts, "b", NUM_FEW)
    ended = ends(parts)
    assert len(ended) == NUM_FLOOD + NUM_FEW
    assert max(map(ended.index, few)) < ended.index(flood[9])


def test_the_base_has_a_share_by_its_name_in_requests(tmp_path: Path) -> None:
    parts = engine(tmp_path, "a=1,me=3")
    flood, few = send(parts, "a", NUM_FLOOD), send(parts, None, 3 * NUM_FEW)
    ended = ends(parts)
    last = max(map(ended.index, few))
    # Three of the base for each of the flood, and those that run beside the last one.
    assert sum(ended.index(one) < last for one in flood) <= NUM_FEW + 4


def test_without_weights_who_comes_after_a_flood_is_last(tmp_path: Path) -> None:
    parts = engine(tmp_path, None)
    send(parts, "a", NUM_FLOOD)
    few = send(parts, "b", NUM_FEW)
    assert ends(parts)[-NUM_FEW:] == few


def test_shares_change_no_answer(tmp_path: Path) -> None:
    prompts = [[*PROMPT, number] for number in range(12)]
    adapters = ["a", "b", None] * 4
    answers = [
        [
            output.completions[0].token_ids
            for output in LLM.over(engine(tmp_path, weights)).generate(
                prompts, PARAMS, adapter=adapters
            )
        ]
        for weights in (None, "a=5,b=0.5")
    ]
    assert answers[0] == answers[1]
