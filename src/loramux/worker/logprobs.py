"""Log-probabilities as the API reports them: the model's own, before penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.types import TokenLogprobs

_CHUNK = 64
"""Rows at a time: a float32 copy of a long prompt's logits would outweigh a small model."""


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """For each row of ``logits [rows, vocab]``: its token's value and its ``num_top`` best ones."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    chosen: list[float] = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(num_top, default=0), logits.shape[1]), dim=-1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprobs(token, chosen[i], tuple(zip(indices[i][:k], values[i][:k], strict=True)))
        for i, (token, k) in enumerate(zip(token_ids, num_top, strict=True))
    ]


def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int], k: int
) -> tuple[TokenLogprobs, ...]:
    """How likely each of ``next_tokens`` was, given the row of ``logits [T, vocab]`` before it.

    There may be fewer tokens than rows: the rows of a prompt's end have no next token.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(next_tokens), _CHUNK):
        tokens = next_tokens[start : start + _CHUNK]
        rows = logits[start : start + len(tokens)]
        found += token_logprobs(rows, tokens, [k] * len(tokens))
    return tuple(found)
