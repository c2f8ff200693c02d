"""From logits to the weights of a draw: penalties, temperature, top_k, top_p, min_p.

The order and the meaning are those of transformers' ``generate``. All rows go through each filter
at once, and what a filter does to a row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loramux.plan import Sample


def adjust(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    """A float32 copy of ``logits [rows, vocab]``, penalised, and -inf for forbidden tokens."""
    scores = logits.to(torch.float32, copy=True)
    for row, sample in zip(scores, samples, strict=True):
        if sample.params.penalised:
            _penalise(row, sample)
        if sample.forbidden:  # a stop token that the model does not have is forbidden enough
            row[[token for token in sample.forbidden if token < len(row)]] = -torch.inf
    return scores


def _penalise(row: Tensor, sample: Sample) -> None:
    """Penalise, in place, the tokens of one sequence in its scores ``row [vocab]``."""
    params = sample.params
    tokens = np.fromiter(sample.tokens, dtype=np.int64, count=len(sample.tokens))
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(tokens)).to(row.device)
        score = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(score < 0, score * penalty, score / penalty)
    if params.presence_penalty or params.frequency_penalty:
        said, times = np.unique(tokens[sample.num_prompt_tokens :], return_counts=True)
        cost = params.presence_penalty + params.frequency_penalty * times
        row[torch.from_numpy(said).to(row.device)] -= torch.from_numpy(cost).to(row)


def filtered_weights(scores: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Probabilities up to a factor, float64 ``[rows, vocab]``: 1 for the best token, 0 if filtered.

    ``scores [rows, vocab]`` are adjusted logits; each row has a finite maximum and a temperature
    above 0.
    """
    params = [sample.params for sample in samples]
    # The maximum goes first, so that no temperature, however small, can make an infinity.
    scores = scores - scores.amax(dim=-1, keepdim=True)
    _keep_top_k(scores, [p.top_k for p in params])
    weights = scores.double().div_(_column([p.temperature for p in params], scores)).exp_()
    _keep_top_p(weights, [p.top_p for p in params])
    if any(p.min_p for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], weights), 0.0)
    return weights


def _keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Put all but each row's k best scores to -inf; ties with the k-th stay, k < 1 keeps all."""
    vocab = scores.shape[-1]
    rows = [i for i, k in enumerate(top_k) if 0 < k < vocab]
    if not rows:
        return
    best = scores[rows].topk(max(top_k[i] for i in rows), dim=-1).values
    kth = torch.tensor([[top_k[i] - 1] for i in rows], device=scores.device)
    lowest = torch.full_like(scores[:, :1], -torch.inf)
    lowest[rows] = best.gather(1, kth)
    scores.masked_fill_(scores < lowest, -torch.inf)


def _keep_top_p(weights: Tensor, top_p: Sequence[float]) -> None:
    """Put to 0 what is outside the fewest best tokens that hold ``top_p`` of the whole weight.

    Ties with the least of them stay, so that the outcome does not hang on how a sort orders ties.
    """
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    some = weights[rows]
    total = some.sum(dim=-1, keepdim=True)
    p = _column([top_p[i] for i in rows], weights)
    # Tokens below this weight hold less than 1 - p together, so they need not be sorted.
    surely_out = total * (1.0 - p) / weights.shape[-1]
    num_sorted = max(1, int((some >= surely_out).sum(dim=-1).max()))
    best = some.topk(num_sorted, dim=-1).values
    num_kept = 1 + (best.cumsum(dim=-1) < total * p).sum(dim=-1, keepdim=True)
    lowest = torch.zeros_like(weights[:, :1])
    lowest[rows] = best.gather(1, num_kept.clamp(max=num_sorted) - 1)
    weights.masked_fill_(weights < lowest, 0.0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
