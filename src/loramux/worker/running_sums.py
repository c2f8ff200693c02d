"""Running sums of whole numbers: where they reach a target, and which values that takes.

The weights of a draw are whole numbers, because their sum is then the same in whatever order a
device adds them up. With floats a row's sum could hang on how many rows are beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK = 256
"""Places that are summed up first: a device scans few long rows slowly, and sums them fast."""

_LOW_BITS = 15
"""Bits of a key that the second histogram tells apart; the first one has the 16 above."""


class RunningSums:
    """The sums of ``weights [rows, places]``, int64, none below 0, from the first place on."""

    def __init__(self, weights: Tensor) -> None:
        if rest := weights.shape[-1] % _CHUNK:
            weights = pad(weights, (0, _CHUNK - rest))
        self._chunks = weights.unflatten(-1, (-1, _CHUNK))
        self._sums = self._chunks.sum(dim=-1)
        self.total = self._sums.sum(dim=-1, keepdim=True)
        """``[rows, 1]``"""

    def reach(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """First place of each row whose running sum is at least ``target``, and the sum before it.

        All are ``[rows, 1]``. A target is at least 1 and at most the row's total.
        """
        chunk, before = _reach(self._sums, target)
        inside = self._chunks.take_along_dim(chunk[..., None], dim=1)[:, 0]
        place, within = _reach(inside, target - before)
        return chunk * _CHUNK + place, before + within


def _reach(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    running = weights.cumsum(dim=-1)
    place = torch.searchsorted(running, target)
    return place, running.gather(-1, place) - weights.gather(-1, place)


def last_key_kept(keys: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """Up to which key the entries of each row hold ``share`` of its weight, smallest keys first.

    ``keys [rows, entries]`` are int32, none below 0; ``weights`` are as in RunningSums, some above
    0; ``share [rows, 1]`` is float64, between 0 and 1. The result ``[rows, 1]`` is exact: with the
    next smaller key of the row there would be less.
    """
    high = (keys >> _LOW_BITS).long()
    coarse = RunningSums(_histogram(high, weights, 31 - _LOW_BITS))
    # A share below 1 by at least 2**-53 keeps the product below the total, also when rounded.
    target = (coarse.total.double() * share).ceil().long()
    bucket, before = coarse.reach(target)
    low = (keys & (2**_LOW_BITS - 1)).long()
    fine = RunningSums(_histogram(low, weights.where(high == bucket, 0), _LOW_BITS))
    place, _ = fine.reach(target - before)
    return (bucket << _LOW_BITS) + place


def _histogram(keys: Tensor, weights: Tensor, bits: int) -> Tensor:
    """The sum of the weights at each key ``[rows, 2**bits]``."""
    return weights.new_zeros(len(keys), 2**bits).scatter_add_(1, keys, weights)
