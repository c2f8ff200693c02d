"""Choose tokens in a step whose rows have vocabularies of several sizes.

Each row is judged by the logits of its own vocabulary alone, as if no wider one were beside it: a
filter, a draw or a sum of exponentials can hang on how many columns there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loramux.plan import Sample
from loramux.worker.sampler import Sampled, Sampler, Sampling
from loramux.worker.transfer import Rows


class MixedSampling:
    """Tokens that are being chosen among several vocabularies, in the order of the rows."""

    def __init__(self, parts: Sequence[tuple[Sequence[int], Sampling]], num_rows: int) -> None:
        """``parts``: rows of one vocabulary each, in ascending order, and what becomes of them."""
        self._parts = parts
        self._num_rows = num_rows
        _, first = parts[0]
        self.token_ids = first.token_ids.new_zeros(num_rows)
        """int64 ``[rows]`` on the device, as ``Sampling`` has them."""
        for rows, sampling in parts:
            Rows(rows, num_rows, self.token_ids.device).replace(self.token_ids, sampling.token_ids)

    def result(self) -> list[Sampled]:
        """What each row has come to; waits for the device."""
        found: dict[int, Sampled] = {}
        for rows, sampling in self._parts:
            found.update(zip(rows, sampling.result(), strict=True))
        return [found[row] for row in range(self._num_rows)]


@torch.inference_mode()
def launch(
    sampler: Sampler, logits: Tensor, samples: Sequence[Sample], vocab_sizes: Sequence[int]
) -> Sampling | MixedSampling:
    """Choose for each row of ``logits [rows, widest]`` among its first ``vocab_sizes[row]``.

    Waits for nothing.
    """
    sizes = sorted(set(vocab_sizes))
    if sizes in ([], [logits.shape[1]]):
        return sampler.launch(logits, samples)
    parts: list[tuple[Sequence[int], Sampling]] = []
    for size in sizes:
        rows = [row for row, own in enumerate(vocab_sizes) if own == size]
        own_logits = Rows(rows, len(samples), logits.device).of(logits)[:, :size].contiguous()
        parts.append((rows, sampler.launch(own_logits, [samples[row] for row in rows])))
    return MixedSampling(parts, len(samples))
