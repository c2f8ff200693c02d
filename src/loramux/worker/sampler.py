"""Choose the next token of each sequence from its logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.types import TokenLogprobs
from loramux.worker.filters import adjust, filtered_weights
from loramux.worker.logprobs import RowLogprobs, row_logprobs
from loramux.worker.running_sums import RunningSums
from loramux.worker.transfer import Download, Rows, upload

_CHUNK = 64
"""Rows at a time with more than an argmax: of a large vocabulary each takes some megabytes."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's next token, or the reason why there is none."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Choice(NamedTuple):
    """Tokens chosen on the device, row by row."""

    token_ids: Tensor
    """int64 ``[rows]``; a token of the vocabulary also where a row is not sound."""
    best: Tensor
    """float32 ``[rows]``: the largest logit, as it tells whether the row is sound."""


class Sampling:
    """Tokens that are being chosen, in the order of the rows."""

    def __init__(
        self, choice: Choice, logprobs: RowLogprobs | None, num_top: Sequence[int | None]
    ) -> None:
        """Start the way to the host. ``logprobs`` has the rows whose ``num_top`` is not None."""
        self.token_ids = choice.token_ids
        """int64 ``[rows]`` on the device, for work that is launched there at once."""
        self._num_top = num_top
        self._arriving = Download((*choice, *(logprobs or ())))

    def result(self) -> list[Sampled]:
        """What each row has come to; waits for the device.

        A row with NaN or +inf, or with nothing but -inf, gets an error; the others go on.
        """
        token_ids, best, *logprobs = self._arriving.wait()
        tokens: list[int] = token_ids.tolist()
        reported = iter(self._reported(tokens, logprobs))
        sampled: list[Sampled] = []
        for token, value, num_top in zip(tokens, best.tolist(), self._num_top, strict=True):
            entry = None if num_top is None else next(reported)
            if isfinite(value):
                sampled.append(Sampled(token, entry))
            else:
                error = f"the logits are not finite (the largest is {value})"
                sampled.append(Sampled(None, error=error))
        return sampled

    def _reported(self, tokens: Sequence[int], found: Sequence[Tensor]) -> list[TokenLogprobs]:
        """Log-probabilities of the rows that asked for them."""
        if not found:
            return []
        asked = [
            (token, k) for token, k in zip(tokens, self._num_top, strict=True) if k is not None
        ]
        return RowLogprobs(*found).listed([token for token, _ in asked], [k for _, k in asked])


class Sampler:
    """Draws or takes the best token, row by row.

    A row's token depends on its logits, its parameters, its seed and its place in the output, never
    on the other rows: a batch put together otherwise, or a sequence computed again, gives the same.
    """

    @torch.inference_mode()
    def launch(self, logits: Tensor, samples: Sequence[Sample]) -> Sampling:
        """Choose for each row of ``logits [rows, vocab]`` (any float dtype) by its sample.

        Waits for nothing: all that is asked of the device is put behind what it does already.
        """
        choice = choose(logits, samples)
        logprobs = reported_logprobs(logits, choice.token_ids, samples)
        return Sampling(choice, logprobs, [sample.params.logprobs for sample in samples])


def choose(logits: Tensor, samples: Sequence[Sample]) -> Choice:
    """The work on the device for each row's token, by its sample."""
    choice = _best(logits)
    special = [i for i, sample in enumerate(samples) if _is_special(sample)]
    for start in range(0, len(special), _CHUNK):
        part = special[start : start + _CHUNK]
        rows = Rows(part, len(samples), logits.device)
        adjusted = _choose_special(rows.of(logits), [samples[i] for i in part])
        best = rows.of(choice.best)
        # What made the row unsound may be gone with a forbidden token, and the row still is.
        rows.replace(choice.best, torch.where(best.isfinite(), adjusted.best, best))
        rows.replace(choice.token_ids, adjusted.token_ids)
    return choice


def _is_special(sample: Sample) -> bool:
    """Whether the row needs more than the best of its raw logits."""
    params = sample.params
    return not params.greedy or params.penalised or bool(sample.forbidden)


def _best(logits: Tensor) -> Choice:
    """The best token of each row."""
    token_ids = logits.argmax(dim=-1)
    # argmax stops at NaN and +inf, so the one value it found tells whether the row is sound.
    return Choice(token_ids, logits.gather(1, token_ids[:, None])[:, 0].float())


def _choose_special(logits: Tensor, samples: Sequence[Sample]) -> Choice:
    """Choose for rows that have penalties, forbidden tokens or a temperature."""
    scores = adjust(logits, samples)
    choice = _best(scores)
    drawn = [i for i, sample in enumerate(samples) if not sample.params.greedy]
    if drawn:
        rows = Rows(drawn, len(samples), logits.device)
        draws = [samples[i] for i in drawn]
        weights = filtered_weights(rows.of(scores), draws)
        rows.replace(choice.token_ids, draw(weights, [_uniform_of(sample) for sample in draws]))
    return choice


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


def _uniform_of(sample: Sample) -> float:
    return uniform(sample.seed, sample.position)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed at a place in the output, the same on every machine."""
    message = struct.pack("<QQ", seed % 2**64, position)
    bits = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def reported_logprobs(
    logits: Tensor, token_ids: Tensor, samples: Sequence[Sample]
) -> RowLogprobs | None:
    """Log-probabilities of the rows that ask for them, None if there is no such row."""
    num_top = {
        i: sample.params.logprobs
        for i, sample in enumerate(samples)
        if sample.params.logprobs is not None
    }
    if not num_top:
        return None
    rows = Rows(list(num_top), len(samples), logits.device)
    return row_logprobs(rows.of(logits), rows.of(token_ids), max(num_top.values()))
