"""Compares the model as it is served with the model as transformers runs it, at start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from loramux.errors import ModelNotServable
from loramux.model.attention_seam import IMPLEMENTATION, AttentionSeam
from loramux.model.experts import transformers_experts
from loramux.model.load import BaseModel
from loramux.plan import SequenceStep, StepPlan
from loramux.types import RequestId, Slot
from loramux.worker.inputs import build_inputs
from loramux.worker.worker import Worker

_STEPS = (((0, 7), (0, 2)), ((7, 8), (2, 11)), ((8, 9), (11, 12)), ((9, 23), (12, 13)))
"""For two sequences, the tokens of each step: long and short, alone and after cached ones."""

_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.3}
"""Largest root mean square of a token's differences, in standard deviations of all logits. A wrong
mask or position is off by one or more; rounding to bfloat16 in other places by a tenth."""

_Part = tuple[int, int, int]
"""A sequence's part of a step: sequence, start and end of its tokens."""


def self_check(
    base: BaseModel,
    worker: Worker,
    seam: AttentionSeam,
    *,
    block_size: int,
    num_blocks: int,
    max_step_tokens: int,
    base_slot: Slot,
) -> float:
    """The largest difference seen, in standard deviations. Raises ModelNotServable.

    Catches whatever a forward pass cannot tell by itself: masks, windows, positions or scores that
    an architecture treats in a way the paged attention does not know.
    """
    longest = min(base.max_model_len, max(end for step in _STEPS for _, end in step))
    blocks_each = -(-longest // block_size)
    num_sequences = min(2, num_blocks // blocks_each)
    prompts = [
        [(i * 7919 + s * 104729 + 1) % base.vocab_size for i in range(longest)]
        for s in range(num_sequences)
    ]
    steps = _steps(num_sequences, longest, max_step_tokens)
    served = _served_logits(worker, prompts, steps, blocks_each, base_slot)
    worst = 0.0
    for prompt, logits in zip(prompts, served, strict=True):
        difference = _difference(logits, _plain_logits(base, seam, prompt[: len(logits)]))
        if not difference <= _TOLERANCE[base.dtype]:  # also when it is NaN
            raise ModelNotServable(
                base.name,
                "as it is served here its logits differ from transformers' own by "
                f"{difference:.3g} standard deviations: the architecture treats attention, "
                "positions or experts in a way that is not supported (--no-self-check serves it "
                "all the same)",
            )
        worst = max(worst, difference)
    return worst


def _served_logits(
    worker: Worker,
    prompts: list[list[int]],
    steps: Iterable[list[_Part]],
    blocks_each: int,
    base_slot: Slot,
) -> list[Tensor]:
    """Logits ``[tokens, vocab]`` of each prompt, as far as the steps go."""
    served: list[list[Tensor]] = [[] for _ in prompts]
    # Blocks in an order that is not that of memory; those of two sequences alternate.
    tables = [
        [len(prompts) * block + i for block in reversed(range(blocks_each))]
        for i in range(len(prompts))
    ]
    for parts in steps:
        sequences = tuple(
            SequenceStep(
                request_id=RequestId(f"self-check-{i}"),
                token_ids=prompts[i][start:end],
                start=start,
                block_table=tables[i],
                slot=base_slot,
                prompt_logprobs=0,
                next_prompt_tokens=prompts[i][start:end],  # one row of logits for every token
            )
            for i, start, end in parts
        )
        rows = worker.forward(build_inputs(StepPlan((), sequences), {}), sequences).logits
        for i, start, end in parts:
            served[i].append(rows[: end - start].clone())
            rows = rows[end - start :]
    return [torch.cat(rows) for rows in served]


def _steps(num_sequences: int, longest: int, max_step_tokens: int) -> Iterator[list[_Part]]:
    """The parts of each step, cut to what the engine's limits allow."""
    for step in _STEPS:
        spans = enumerate(step[:num_sequences])
        parts = [(i, a, min(b, longest)) for i, (a, b) in spans if a < longest]
        if not parts:
            return
        if sum(b - a for _, a, b in parts) <= max_step_tokens:
            yield parts
        else:
            for i, a, b in parts:
                for start in range(a, b, max_step_tokens):
                    yield [(i, start, min(start + max_step_tokens, b))]


@torch.inference_mode()
def _plain_logits(base: BaseModel, seam: AttentionSeam, tokens: list[int]) -> Tensor:
    seam.use("eager")
    try:
        # As transformers runs it, and layers that are compiled are not compiled for this once.
        with transformers_experts(base.model), torch.compiler.set_stance("force_eager"):
            return base.model(
                input_ids=torch.tensor([tokens], device=base.model.device), use_cache=False
            ).logits[0]
    finally:
        seam.use(IMPLEMENTATION)


def _difference(served: Tensor, plain: Tensor) -> float:
    """NaN, which compares as too large, if either has one."""
    rows = (served.float() - plain.float()).square().mean(dim=1).sqrt()
    return float(rows.max() / plain.float().std())
