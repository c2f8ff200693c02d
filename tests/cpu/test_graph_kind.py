"""Which steps a captured graph can compute."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from loramux.ops.attention import StepKind
from loramux.plan import Sample, SequenceStep, StepPlan
from loramux.types import RequestId, SamplingParams, Slot
from loramux.worker.captured_runner import graph_kind
from loramux.worker.inputs import build_inputs

GREEDY = SamplingParams(temperature=0)


def sequence(tokens: int, *, sampled: bool = True, prompt: int = 0) -> SequenceStep:
    sample = Sample(params=GREEDY, seed=0, tokens=[1], num_prompt_tokens=1, position=0)
    return SequenceStep(
        request_id=RequestId("r"),
        token_ids=[1] * tokens,
        start=0,
        block_table=[0],
        slot=Slot(0),
        sample=sample if sampled else None,
        prompt_logprobs=0 if prompt else None,
        next_prompt_tokens=[1] * prompt,
    )


@pytest.mark.parametrize(
    ("sequences", "kind"),
    [
        ([sequence(1)], StepKind.DECODE),
        ([sequence(1)] * 3, StepKind.DECODE),
        ([sequence(1), sequence(5)], StepKind.MIXED),
        ([sequence(4, sampled=False)], StepKind.MIXED),
        # A chunk of one token that samples nothing: a row without logits.
        ([sequence(1), sequence(1, sampled=False)], StepKind.MIXED),
        # As many logits as rows, but not in the order of the rows.
        ([sequence(1, sampled=False, prompt=1), sequence(1)], StepKind.MIXED),
        ([sequence(5, prompt=4)], None),
    ],
    ids=str,
)
def test_a_graph_computes_what_it_has_room_and_order_for(
    sequences: Sequence[SequenceStep], kind: StepKind | None
) -> None:
    inputs = build_inputs(StepPlan((), tuple(sequences)), {})
    assert graph_kind(inputs, len(sequences)) is kind
