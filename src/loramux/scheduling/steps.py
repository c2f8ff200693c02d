"""What a step is: how large at most, of which requests, and what it computes for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loramux.plan import LOAD_BYTES, PENDING_TOKEN, Sample, SequenceStep, StepPlan
from loramux.scheduling.request import Request
from loramux.types import PoolingParams, Slot


@dataclass(frozen=True)
class Limits:
    """Sizes of one step."""

    max_num_seqs: int
    max_step_tokens: int
    block_size: int
    max_load_bytes: int = LOAD_BYTES
    """Of adapters that come into slots while others run (``LoadBudget``)."""


@dataclass(frozen=True)
class Step:
    """A plan and the requests it is about, in the plan's order."""

    plan: StepPlan
    requests: tuple[Request, ...]


def sequence_step(
    request: Request,
    count: int,
    slot: Slot,
    forbidden_tokens: Callable[[Request], tuple[int, ...]],
) -> SequenceStep:
    """``count`` more tokens of a running request, whose adapter is in this slot."""
    start, num_tokens = request.num_computed, request.num_tokens
    end = start + count
    token_ids = request.tokens[start:end]
    if request.num_in_flight:
        assert not token_ids, "a token that is known stands before one that is not computed"
        token_ids = [PENDING_TOKEN]
    params, sample, hidden = request.params, None, None
    if isinstance(params, PoolingParams):
        if params.pooling == "mean":
            hidden = "sum"
        elif end == num_tokens:
            hidden = "last"
    elif end == num_tokens:
        sample = Sample(
            params=params,
            seed=request.seed,
            tokens=request.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            position=num_tokens - request.num_prompt_tokens,
            forbidden=forbidden_tokens(request) if params.min_tokens else (),
            allowed=None if request.matcher is None else request.matcher.allowed,
        )
    prompt_top = None
    if not isinstance(params, PoolingParams) and request.wants_prompt_logprobs:
        prompt_top = params.prompt_logprobs
    return SequenceStep(
        request_id=request.request_id,
        token_ids=token_ids,
        start=start,
        block_table=request.blocks[:],
        slot=slot,
        sample=sample,
        prompt_logprobs=prompt_top,
        # There is no output yet while some of these are missing.
        next_prompt_tokens=() if prompt_top is None else request.tokens[start + 1 : end + 1],
        hidden=hidden,
    )
