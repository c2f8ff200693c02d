"""A plan as the arrays of one forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    tokens = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in plan.sequences])
    positions = np.concatenate(
        [np.arange(s.start, s.start + len(s.token_ids)) for s in plan.sequences]
    )
    attention: list[AttentionSequence] = []
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    pending: list[tuple[int, int]] = []
    row = 0
    for s in plan.sequences:
        count = len(s.token_ids)
        if s.token_ids[0] == PENDING_TOKEN:
            pending.append((row, last_rows[s.request_id]))
        attention.append(AttentionSequence(row, count, s.start, s.block_table))
        if s.sample is not None:
            sample_rows.append(row + count - 1)
        prompt_rows.extend(range(row, row + len(s.next_prompt_tokens)))
        row += count
    pending_rows, pending_sources = np.array(pending, dtype=np.int64).reshape(-1, 2).T
    tokens[pending_rows] = 0
    return StepInputs(
        token_ids=tokens,
        positions=positions,
        attention=attention,
        logit_rows=np.array(sample_rows + prompt_rows, dtype=np.int64),
        sampled=[s for s in plan.sequences if s.sample is not None],
        pending_rows=np.ascontiguousarray(pending_rows),
        pending_sources=np.ascontiguousarray(pending_sources),
    )
