"""Choose the next token of each sequence from its logits."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.types import TokenLogprobs
from loramux.worker.filters import adjust, filtered_weights
from loramux.worker.logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's next token, or the reason why there is none."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class Sampler:
    """Draws or takes the best token, row by row.

    A row's token depends on its logits, its parameters, its seed and its place in the output, never
    on the other rows: a batch put together otherwise, or a sequence computed again, gives the same.
    """

    def __call__(self, logits: Tensor, samples: Sequence[Sample]) -> list[Sampled]:
        """Choose for each row of ``logits [rows, vocab]`` (any float dtype) by its sample.

        A row with NaN or +inf, or with nothing but -inf, gets an error; the others go on.
        """
        tokens, errors = _best(logits)
        special = [i for i, sample in enumerate(samples) if _is_special(sample)]
        if special:
            chosen, failed = _choose(logits[special], [samples[i] for i in special])
            for i, token in zip(special, chosen, strict=True):
                tokens[i] = token
            errors |= {special[i]: error for i, error in failed.items()}
        logprobs = _reported(logits, samples, tokens, errors)
        return [
            Sampled(None, error=errors[i]) if i in errors else Sampled(token, logprobs.get(i))
            for i, token in enumerate(tokens)
        ]


def _is_special(sample: Sample) -> bool:
    """Whether the row needs more than the best of its raw logits."""
    params = sample.params
    return not params.greedy or params.penalised or bool(sample.forbidden)


def _best(logits: Tensor) -> tuple[list[int], dict[int, str]]:
    """The best token of each row, and an error for each row whose best is no finite number."""
    token = logits.argmax(dim=-1, keepdim=True)
    # argmax stops at NaN and +inf, so the one value it found tells whether the row is sound.
    # float64 holds every token id and logit: both travel in one transfer.
    found = torch.cat((token.double(), logits.gather(1, token).double()), dim=1).tolist()
    errors = {
        i: f"the logits are not finite (the largest is {value})"
        for i, (_, value) in enumerate(found)
        if not isfinite(value)
    }
    return [int(token) for token, _ in found], errors


def _choose(logits: Tensor, samples: Sequence[Sample]) -> tuple[list[int], dict[int, str]]:
    """Choose for rows that have penalties, forbidden tokens or a temperature."""
    scores = adjust(logits, samples)
    tokens, errors = _best(scores)
    drawn = [i for i, s in enumerate(samples) if i not in errors and not s.params.greedy]
    if drawn:
        draws = [samples[i] for i in drawn]
        weights = filtered_weights(scores[drawn], draws)
        for i, token in zip(drawn, _draw(weights, [_uniform_of(s) for s in draws]), strict=True):
            tokens[i] = token
    return tokens, errors


def _draw(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Inverse of the distribution function of ``weights [rows, vocab]``, in order of token ids."""
    reached = weights.cumsum(dim=-1)
    # A uniform below 1 by at least 2**-53 keeps the product below the total, also when rounded.
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None]
    target = target * reached[:, -1:]
    return torch.searchsorted(reached, target, right=True)[:, 0].tolist()


def _uniform_of(sample: Sample) -> float:
    return uniform(sample.seed, sample.position)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed at a place in the output, the same on every machine."""
    message = struct.pack("<QQ", seed % 2**64, position)
    bits = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def _reported(
    logits: Tensor, samples: Sequence[Sample], tokens: Sequence[int], errors: dict[int, str]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that asked for them."""
    num_top = {
        i: sample.params.logprobs
        for i, sample in enumerate(samples)
        if sample.params.logprobs is not None and i not in errors
    }
    if not num_top:
        return {}
    rows = list(num_top)
    found = token_logprobs(logits[rows], [tokens[i] for i in rows], list(num_top.values()))
    return dict(zip(rows, found, strict=True))
