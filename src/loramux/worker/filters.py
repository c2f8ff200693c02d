"""From logits to the weights of a draw: penalties, temperature, top_k, top_p, min_p.

The order and the meaning are those of transformers' ``generate``. All rows go through each filter
at once, and what a filter does to a row depends on that row alone. Nothing here waits for the
device: sizes and indices come from the samples, never from the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.worker.running_sums import last_key_kept
from loramux.worker.transfer import Rows, upload


def adjust(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    """A float32 copy of ``logits [rows, vocab]``, penalised, and -inf for forbidden tokens."""
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    _penalise_repetition(scores, samples)
    _penalise_output(scores, samples)
    _forbid(scores, samples)
    return scores


def _penalise_repetition(scores: Tensor, samples: Sequence[Sample]) -> None:
    places: list[np.ndarray] = []
    penalties: list[np.ndarray] = []
    for row, sample in enumerate(samples):
        if sample.params.repetition_penalty != 1.0:
            seen = np.unique(_history(sample))
            places.append(row * scores.shape[1] + seen)
            penalties.append(np.full(len(seen), sample.params.repetition_penalty))
    if places:
        where = upload(np.concatenate(places), torch.int64, scores.device)
        penalty = upload(np.concatenate(penalties), torch.float32, scores.device)
        score = scores.view(-1).index_select(0, where)
        penalised = torch.where(score < 0, score * penalty, score / penalty)
        scores.view(-1).index_copy_(0, where, penalised)


def _penalise_output(scores: Tensor, samples: Sequence[Sample]) -> None:
    places: list[np.ndarray] = []
    costs: list[np.ndarray] = []
    for row, sample in enumerate(samples):
        params = sample.params
        if params.presence_penalty or params.frequency_penalty:
            output = _history(sample)[sample.num_prompt_tokens :]
            said, times = np.unique(output, return_counts=True)
            places.append(row * scores.shape[1] + said)
            costs.append(params.presence_penalty + params.frequency_penalty * times)
    if places:
        where = upload(np.concatenate(places), torch.int64, scores.device)
        cost = upload(np.concatenate(costs), torch.float32, scores.device)
        # No index_add_: its atomics are needless, since no place comes twice.
        scores.view(-1).index_copy_(0, where, scores.view(-1).index_select(0, where) - cost)


def _forbid(scores: Tensor, samples: Sequence[Sample]) -> None:
    vocab = scores.shape[1]
    places = [
        row * vocab + token
        for row, sample in enumerate(samples)
        for token in sample.forbidden
        if token < vocab  # a stop token that the model does not have is forbidden enough
    ]
    if places:
        scores.view(-1).index_fill_(0, upload(places, torch.int64, scores.device), -torch.inf)


def _history(sample: Sample) -> np.ndarray:
    return np.fromiter(sample.tokens, dtype=np.int64, count=len(sample.tokens))


def filtered_weights(scores: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Probabilities up to a factor, int64 ``[rows, vocab]``: 0 for a token that is filtered out.

    ``scores [rows, vocab]`` are adjusted logits; each row has a temperature above 0. The best token
    weighs a power of two, so large that the sum of a row just fits into 2**62: with 131072 tokens
    it is 2**45, and a token less likely than the best by more than that weighs nothing. A row
    without a finite maximum gets weights, too, though they mean nothing.
    """
    params = [sample.params for sample in samples]
    # Distance to the best goes first, so that no temperature, however small, makes an infinity.
    # The sum makes 0.0 of a best of -0.0, whose distance to 0.0 would have a sign.
    best = scores.amax(dim=-1, keepdim=True) + 0.0
    gaps = (best - scores).masked_fill_(~best.isfinite(), 0.0)
    _keep_top_k(gaps, [p.top_k for p in params])
    unit = 2.0 ** (62 - (scores.shape[1] - 1).bit_length())
    exact = gaps.double().div_(_column([-p.temperature for p in params], gaps)).exp_().mul_(unit)
    weights = exact.long()
    _keep_top_p(weights, gaps, [p.top_p for p in params])
    if any(p.min_p for p in params):
        weights.masked_fill_(exact < _column([p.min_p * unit for p in params], exact), 0)
    return weights


def _keep_top_k(gaps: Tensor, top_k: Sequence[int]) -> None:
    """Put all but each row's k smallest gaps to inf; ties with the k-th stay, k < 1 keeps all."""
    num_rows, vocab = gaps.shape
    limited = [i for i, k in enumerate(top_k) if 0 < k < vocab]
    if not limited:
        return
    rows = Rows(limited, num_rows, gaps.device)
    least = rows.of(gaps).topk(max(top_k[i] for i in limited), dim=-1, largest=False).values
    kth = upload([top_k[i] - 1 for i in limited], torch.int64, gaps.device)
    largest = torch.full_like(gaps[:, :1], torch.inf)
    rows.replace(largest, least.gather(1, kth[:, None]))
    gaps.masked_fill_(gaps > largest, torch.inf)


def _keep_top_p(weights: Tensor, gaps: Tensor, top_p: Sequence[float]) -> None:
    """Put to 0 what is outside the fewest best tokens that hold ``top_p`` of the whole weight.

    Ties with the least of them stay, so that the outcome does not hang on how a sort orders ties.
    """
    limited = [i for i, p in enumerate(top_p) if p < 1.0]
    if not limited:
        return
    rows = Rows(limited, len(top_p), weights.device)
    keys = gaps.view(torch.int32)  # floats that are not negative are ordered as their bits are
    share = _column([top_p[i] for i in limited], weights)
    last = torch.full_like(weights[:, :1], torch.iinfo(torch.int32).max)
    rows.replace(last, last_key_kept(rows.of(keys), rows.of(weights), share))
    weights.masked_fill_(keys > last, 0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(values, torch.float64, like.device)[:, None]
