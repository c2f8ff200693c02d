"""Log-probabilities as the API reports them: the model's own, before penalties and filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loramux.types import TokenLogprobs
from loramux.worker.transfer import Download, upload

_CHUNK = 64
"""Rows at a time: a float32 copy of a long prompt's logits would outweigh a small model."""


class RowLogprobs(NamedTuple):
    """Log-probabilities of each row: of one token, and of the best ones in falling order."""

    chosen: Tensor
    """``[rows]``"""
    best: Tensor
    """``[rows, k]``"""
    best_ids: Tensor
    """``[rows, k]``"""

    def listed(self, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """For each row its token's value and its ``num_top`` best ones; waits for the device."""
        values, ids = self.best.tolist(), self.best_ids.tolist()
        rows = zip(token_ids, self.chosen.tolist(), num_top, strict=True)
        return [
            TokenLogprobs(token, chosen, tuple(zip(ids[i][:k], values[i][:k], strict=True)))
            for i, (token, chosen, k) in enumerate(rows)
        ]


def row_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> RowLogprobs:
    """Of ``logits [rows, vocab]``, those of ``token_ids [rows]`` and of the ``k`` best tokens."""
    parts: list[RowLogprobs] = []
    for rows, tokens in zip(logits.split(_CHUNK), token_ids.split(_CHUNK), strict=True):
        logprobs = torch.log_softmax(rows.float(), dim=-1)
        best = logprobs.topk(min(k, logits.shape[1]), dim=-1)
        parts.append(
            RowLogprobs(logprobs.gather(1, tokens[:, None])[:, 0], best.values, best.indices)
        )
    return RowLogprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens that are being computed."""

    def __init__(self, found: RowLogprobs, token_ids: Sequence[int], k: int) -> None:
        self._token_ids = token_ids
        self._num_top = [k] * len(token_ids)
        self._found = Download(found)

    def result(self) -> tuple[TokenLogprobs, ...]:
        """One entry for each token; waits for the device."""
        found = RowLogprobs(*self._found.wait())
        return tuple(found.listed(self._token_ids, self._num_top))


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_tokens: Sequence[int], k: int) -> PromptLogprobs:
    """How likely each of ``next_tokens`` was, given the row of ``logits [T, vocab]`` before it.

    There may be fewer tokens than rows: the rows of a prompt's end have no next token.
    """
    tokens = upload(next_tokens, torch.int64, logits.device)
    return PromptLogprobs(row_logprobs(logits[: len(next_tokens)], tokens, k), next_tokens, k)
