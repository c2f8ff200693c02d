"""Steps that have run by the time their launch returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from loramux.plan import PENDING_TOKEN, SequenceStep, StepPlan, StepResult
from loramux.types import RequestId


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A launched step whose result has been there from the start."""

    _result: StepResult

    def result(self) -> StepResult:
        return self._result


def with_pending_tokens(plan: StepPlan, last: Mapping[RequestId, int | None]) -> StepPlan:
    """The plan with tokens known, ``last`` being what the step before has sampled."""
    sequences = tuple(_with_pending_token(sequence, last) for sequence in plan.sequences)
    return replace(plan, sequences=sequences)


def _with_pending_token(
    sequence: SequenceStep, last: Mapping[RequestId, int | None]
) -> SequenceStep:
    if sequence.token_ids[0] != PENDING_TOKEN:
        return sequence
    token = last[sequence.request_id]
    # None is a row that has failed: nobody reads what follows, so any token will do.
    return replace(sequence, token_ids=(0 if token is None else token,))
