"""A plan as the arrays of one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from loramux.ops.attention import AttentionSequence
from loramux.plan import PENDING_TOKEN, SequenceStep, StepPlan
from loramux.types import RequestId


@dataclass(frozen=True)
class StepInputs:
    """``token_ids`` and ``positions`` are ``[T]``; all sequences stand one behind the other."""

    token_ids: np.ndarray
    """0 where the token is pending."""
    positions: np.ndarray
    attention: list[AttentionSequence]
    logit_rows: np.ndarray
    """Rows whose logits are needed: those to sample, then those of prompt log-probabilities."""
    sampled: list[SequenceStep]
    """The sequences that sample, in the order of ``logit_rows``."""
    pending_rows: np.ndarray
    """Rows whose token the step before samples."""
    pending_sources: np.ndarray
    """Their places in what that step samples."""

    @staticmethod
    def empty() -> StepInputs:
        """A step without sequences."""
        nothing = np.zeros(0, dtype=np.int64)
        return StepInputs(nothing, nothing, [], nothing, [], nothing, nothing)


def build_inputs(plan: StepPlan, last_rows: Mapping[RequestId, int]) -> StepInputs:
    """Lay a plan's sequences out.

    ``last_rows``: where the step before samples each request's token.
    """
    sequences = plan.sequences
    counts = [len(s.token_ids) for s in sequences]
    first_rows = [0, *accumulate(counts)]
    num_tokens = first_rows.pop()
    tokens = np.fromiter(
        chain.from_iterable(s.token_ids for s in sequences), dtype=np.int64, count=num_tokens
    )
    # A row's position is as far from its number as in the first row of its sequence.
    offsets = [s.start - row for s, row in zip(sequences, first_rows, strict=True)]
    positions = np.arange(num_tokens) + np.repeat(np.array(offsets, dtype=np.int64), counts)
    sampled = [
        (s, row + count - 1)
        for s, row, count in zip(sequences, first_rows, counts, strict=True)
        if s.sample is not None
    ]
    prompt_rows = [
        row + i
        for s, row in zip(sequences, first_rows, strict=True)
        if s.next_prompt_tokens
        for i in range(len(s.next_prompt_tokens))
    ]
    pending_rows = np.flatnonzero(tokens == PENDING_TOKEN)
    pending = [s.request_id for s in sequences if s.token_ids[0] == PENDING_TOKEN]
    tokens[pending_rows] = 0
    return StepInputs(
        token_ids=tokens,
        positions=positions,
        attention=[
            AttentionSequence(row, count, s.start, s.block_table)
            for s, row, count in zip(sequences, first_rows, counts, strict=True)
        ],
        logit_rows=np.array([row for _, row in sampled] + prompt_rows, dtype=np.int64),
        sampled=[s for s, _ in sampled],
        pending_rows=pending_rows,
        pending_sources=np.array([last_rows[r] for r in pending], dtype=np.int64),
    )
