"""From logits to the weights of a draw.

Guides and biases first; then penalties, temperature, top_k, top_p and min_p, in the order and with
the meaning of transformers' ``generate``. All rows go through each filter at once, and what a
filter does to a row depends on that row alone. Nothing here waits for the device: sizes and indices
come from the samples, never from the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.worker.running_sums import last_key_kept
from loramux.worker.transfer import Rows, upload, upload_all


def adjust(logits: Tensor, samples: Sequence[Sample]) -> Tensor:
    """A float32 copy of ``logits [rows, vocab]``, biased, then penalised, and -inf for tokens that
    may not come: those that are forbidden, and those that a guide does not allow."""
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    vocab = scores.shape[1]
    histories = {row: _history(s) for row, s in enumerate(samples) if s.params.penalised}
    masks, biased, bias, seen, penalty, said, cost, forbidden = upload_all(
        (
            _masks(samples, vocab),
            *_biases(samples, vocab),
            *_repetitions(samples, histories, vocab),
            *_outputs(samples, histories, vocab),
            _forbidden(samples, vocab),
        ),
        scores.device,
    )
    _keep_allowed(scores, masks, samples)
    flat = scores.view(-1)
    if len(biased):
        flat.index_copy_(0, biased, flat.index_select(0, biased) + bias)
    # A token comes as often as it was seen, and each time the same is written to its place.
    if len(seen):
        score = flat.index_select(0, seen)
        flat.index_copy_(0, seen, torch.where(score < 0, score * penalty, score / penalty))
    if len(said):
        flat.index_copy_(0, said, flat.index_select(0, said) - cost)
    if len(forbidden):
        flat.index_fill_(0, forbidden, -torch.inf)
    return scores


def _masks(samples: Sequence[Sample], vocab: int) -> np.ndarray:
    """The allowed tokens of each row that has a guide, joined: uint8, each byte for eight tokens.

    As long as a row of logits, whatever the tokenizer has.
    """
    given = [sample.allowed for sample in samples if sample.allowed is not None]
    masks = np.zeros((len(given), _mask_bytes(vocab)), dtype=np.uint8)
    for mask, allowed in zip(masks, given, strict=True):
        known = np.frombuffer(allowed, dtype=np.uint8)[: len(mask)]
        mask[: len(known)] = known
    return masks.reshape(-1)


def _keep_allowed(scores: Tensor, masks: Tensor, samples: Sequence[Sample]) -> None:
    """Put to -inf what the guides of rows do not allow; ``masks`` as above, on the device."""
    guided = [row for row, sample in enumerate(samples) if sample.allowed is not None]
    if not guided:
        return
    num_rows, vocab = scores.shape
    rows = Rows(guided, num_rows, scores.device)
    places = torch.arange(8, dtype=torch.uint8, device=scores.device)
    bits = masks.view(len(guided), _mask_bytes(vocab), 1) >> places & 1
    allowed = bits.flatten(1)[:, :vocab].bool()
    rows.replace(scores, rows.of(scores).masked_fill(~allowed, -torch.inf))


def _mask_bytes(vocab: int) -> int:
    return -(-vocab // 8)


def _biases(samples: Sequence[Sample], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the flat scores have a token with a bias, and the bias."""
    given = [
        (row * vocab + token, bias)
        for row, sample in enumerate(samples)
        for token, bias in sample.params.logit_bias
    ]
    places = np.array([place for place, _ in given], dtype=np.int64)
    return places, np.array([bias for _, bias in given], dtype=np.float32)


def _history(sample: Sample) -> np.ndarray:
    return np.fromiter(sample.tokens, dtype=np.int64, count=len(sample.tokens))


def _repetitions(
    samples: Sequence[Sample], histories: Mapping[int, np.ndarray], vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the flat scores have a token of the prompt or output, and the penalty there."""
    rows = [row for row in histories if samples[row].params.repetition_penalty != 1.0]
    penalties = [samples[row].params.repetition_penalty for row in rows]
    lengths = [len(histories[row]) for row in rows]
    places = _joined([row * vocab + histories[row] for row in rows])
    return places, np.repeat(np.array(penalties, dtype=np.float32), lengths)


def _outputs(
    samples: Sequence[Sample], histories: Mapping[int, np.ndarray], vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the flat scores have a token of the output, and what is subtracted there."""
    once, each = (
        np.array([getattr(sample.params, name) for sample in samples], dtype=np.float64)
        for name in ("presence_penalty", "frequency_penalty")
    )
    rows = [row for row in histories if once[row] or each[row]]
    said = _joined([row * vocab + histories[row][samples[row].num_prompt_tokens :] for row in rows])
    cost = once[said // vocab]
    if each.any():
        said, times = np.unique(said, return_counts=True)
        cost = once[said // vocab] + each[said // vocab] * times
    return said, cost.astype(np.float32)


def _forbidden(samples: Sequence[Sample], vocab: int) -> np.ndarray:
    places = [
        row * vocab + token
        for row, sample in enumerate(samples)
        for token in sample.forbidden
        if token < vocab  # a stop token that the model does not have is forbidden enough
    ]
    return np.array(places, dtype=np.int64)


def _joined(places: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(places) if places else np.zeros(0, dtype=np.int64)


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
    unit = weight_unit(scores.shape[1])
    exact = gaps.double().mul_(_column([rate_of(p.temperature) for p in params], gaps))
    exact = exact.exp_().mul_(unit)
    weights = exact.long()
    _keep_top_p(weights, gaps, [p.top_p for p in params])
    if any(p.min_p for p in params):
        weights.masked_fill_(exact < _column([p.min_p * unit for p in params], exact), 0)
    return weights


def weight_unit(vocab: int) -> float:
    """What the best token weighs."""
    return 2.0 ** (62 - (vocab - 1).bit_length())


def rate_of(temperature: float) -> float:
    """By what a distance to the best is multiplied for the logarithm of a probability."""
    # Finite for every temperature, so that no distance at all stays none.
    return -min(1.0 / temperature, sys.float_info.max)


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
