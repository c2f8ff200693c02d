"""Draw tokens for the rows that have a temperature: by torch, or on a GPU by one kernel."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.worker.filters import filtered_weights, rate_of, weight_unit
from loramux.worker.running_sums import RunningSums
from loramux.worker.transfer import Rows, upload

CHUNK = 64
"""Rows at a time with more than an argmax: of a large vocabulary each takes some megabytes."""


class Choice(NamedTuple):
    """Tokens chosen on the device, row by row."""

    token_ids: Tensor
    """int64 ``[rows]``; a token of the vocabulary also where a row is not sound."""
    best: Tensor
    """float32 ``[rows]``: the largest logit, as it tells whether the row is sound."""


class Draw(Protocol):
    """Draws for some rows of a batch. One is chosen for a device, once."""

    def __call__(self, scores: Tensor, choice: Choice, drawn: Mapping[int, Sample]) -> None:
        """Replace the best tokens of the rows ``drawn`` in ``choice`` by tokens that are drawn.

        ``scores [rows, vocab]``, of any float dtype, are logits after penalties, and ``choice`` is
        the best of them. Rows stand in ascending order; each has a temperature above 0.
        """
        ...


def draw_for(device: torch.device) -> Draw:
    """The fastest way for a device."""
    return draw_by_triton if device.type == "cuda" else draw_by_torch


def draw_by_torch(scores: Tensor, choice: Choice, drawn: Mapping[int, Sample]) -> None:
    """``Draw`` on any device; it says what a draw means."""
    numbers = list(drawn)
    for start in range(0, len(numbers), CHUNK):
        part = numbers[start : start + CHUNK]
        samples = [drawn[row] for row in part]
        rows = Rows(part, len(scores), scores.device)
        weights = filtered_weights(rows.of(scores).float(), samples)
        rows.replace(choice.token_ids, draw(weights, [uniform_of(s) for s in samples]))


def draw_by_triton(scores: Tensor, choice: Choice, drawn: Mapping[int, Sample]) -> None:
    """``Draw`` in one launch, after one upload."""
    from loramux.ops.triton_sampling import draw_tokens

    if not drawn:
        return
    vocab = scores.shape[1]
    unit = weight_unit(vocab)
    numbers = np.array([_numbers_of(row, sample, vocab, unit) for row, sample in drawn.items()])
    draws = upload(numbers, torch.float64, scores.device)
    draw_tokens(scores, choice.best, draws, choice.token_ids, unit=unit)


def _numbers_of(row: int, sample: Sample, vocab: int, unit: float) -> tuple[float, ...]:
    """A draw as the kernel takes it."""
    params = sample.params
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    least = params.min_p * unit
    return row, rate_of(params.temperature), top_k, params.top_p, least, uniform_of(sample)


def draw(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Inverse of the distribution function of ``weights [rows, vocab]``, in order of token ids.

    ``weights`` are as in RunningSums, some of each row above 0; the tokens are int64 ``[rows]``.
    """
    sums = RunningSums(weights)
    uniform = upload(uniforms, torch.float64, weights.device)[:, None]
    # A uniform below 1 by at least 2**-53 keeps the product below the total, also when rounded.
    passed = (sums.total.double() * uniform).long()
    place, _ = sums.reach(passed + 1)
    return place[:, 0]


def uniform_of(sample: Sample) -> float:
    """The random number of a sample's token."""
    return uniform(sample.seed, sample.position)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed at a place in the output, the same on every machine."""
    message = struct.pack("<QQ", seed % 2**64, position)
    bits = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
