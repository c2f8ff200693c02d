"""Choose the next token of each sequence from its logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.types import SamplingParams, TokenLogprobs
from loramux.worker.drawing import CHUNK, Choice, Draw, draw_by_torch
from loramux.worker.filters import adjust
from loramux.worker.logprobs import RowLogprobs, row_logprobs
from loramux.worker.transfer import Download, Rows

log = logging.getLogger(__name__)


class Sampled(NamedTuple):
    """One sequence's next token, or the reason why there is none."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


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


_PROBES = [
    SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    for temperature in (0.5, 1.0, 2.0)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.8, 0.05))
    for penalty in (1.0, 1.1)
]
"""Rows whose tokens are compared at start."""


class Sampler:
    """Draws or takes the best token, row by row.

    A row's token depends on its logits, its parameters, its seed and its place in the output, never
    on the other rows: a batch put together otherwise, or a sequence computed again, gives the same.
    """

    def __init__(self, draw: Draw = draw_by_torch) -> None:
        self._draw = draw

    def warm_up(self, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what the first draws from such logits would have to wait for, and try it.

        A way to draw that gives other tokens than torch's, or fails, is given up for that.
        """
        if self._draw is draw_by_torch:
            return
        samples = [
            Sample(replace(params, seed=row), row, (0,), num_prompt_tokens=1, position=row)
            for row, params in enumerate(_PROBES)
        ]
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(len(samples), vocab, device=device, generator=generator)
        logits = logits.mul_(3).to(dtype)
        expected = choose(logits, samples).token_ids.tolist()
        try:
            found = choose(logits, samples, self._draw).token_ids.tolist()
        except Exception as error:  # of a compiler or driver, which have many
            found = f"{type(error).__name__}: {error}"
        if found != expected:
            log.warning("this device's own way to draw tokens is wrong (%s): torch draws", found)
            self._draw = draw_by_torch

    @torch.inference_mode()
    def launch(self, logits: Tensor, samples: Sequence[Sample]) -> Sampling:
        """Choose for each row of ``logits [rows, vocab]`` (any float dtype) by its sample.

        Waits for nothing: all that is asked of the device is put behind what it does already.
        """
        choice = choose(logits, samples, self._draw)
        logprobs = reported_logprobs(logits, choice.token_ids, samples)
        return Sampling(choice, logprobs, [sample.params.logprobs for sample in samples])


def choose(logits: Tensor, samples: Sequence[Sample], draw: Draw = draw_by_torch) -> Choice:
    """The work on the device for each row's token, by its sample."""
    choice = _best(logits)
    drawn = {i: s for i, s in enumerate(samples) if not s.params.greedy and not _is_adjusted(s)}
    draw(logits, choice, drawn)
    adjusted = [i for i, sample in enumerate(samples) if _is_adjusted(sample)]
    for start in range(0, len(adjusted), CHUNK):
        part = adjusted[start : start + CHUNK]
        rows = Rows(part, len(samples), logits.device)
        found = _choose_adjusted(rows.of(logits), [samples[i] for i in part], draw)
        best = rows.of(choice.best)
        # What made the row unsound may be gone with a token that may not come; the row still is.
        rows.replace(choice.best, torch.where(best.isfinite(), found.best, best))
        rows.replace(choice.token_ids, found.token_ids)
    return choice


def _is_adjusted(sample: Sample) -> bool:
    """Whether the row is chosen from by other scores than its raw logits."""
    if sample.allowed is not None or sample.params.logit_bias:
        return True
    return sample.params.penalised or bool(sample.forbidden)


def _best(logits: Tensor) -> Choice:
    """The best token of each row."""
    token_ids = logits.argmax(dim=-1)
    # argmax stops at NaN and +inf, so the one value it found tells whether the row is sound.
    return Choice(token_ids, logits.gather(1, token_ids[:, None])[:, 0].float())


def _choose_adjusted(logits: Tensor, samples: Sequence[Sample], draw: Draw) -> Choice:
    """Choose for rows that have penalties, biases, forbidden tokens or a guide."""
    scores = adjust(logits, samples)
    choice = _best(scores)
    draw(scores, choice, {i: s for i, s in enumerate(samples) if not s.params.greedy})
    return choice


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
