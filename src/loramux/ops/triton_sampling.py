"""Launches of the kernel that draws tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from loramux.ops.sampling_kernel import BLOCK, NUM_WARPS, ROOM, draw_kernel

# Launch options are no parameters of the kernel, so a type checker cannot know them.
_draw: Any = draw_kernel


def draw_tokens(
    scores: Tensor,
    best: Tensor,
    draws: Tensor,
    token_ids: Tensor,
    *,
    unit: float,
    block: int = BLOCK,
    room: int = ROOM,
) -> None:
    """Draw a token for some rows of ``scores [rows, vocab]`` and write it to ``token_ids [rows]``.

    Semantics, for a row with gaps g = best - score in float32: entries above the k-th smallest gap
    are left out, if k is not 0. An entry weighs floor(w), w = exp(g * rate) * unit in float64. If p
    is below 1, those stay that have the smallest gaps and come to ceil(total * p), as few as can.
    Ties stay in both. Then entries with w below the least weight go. The token is the first at
    which the running sum of the weights is above floor(total * uniform). A row whose best is not
    finite keeps the token that it has.

    draws ``[n, 6]`` float64, each row at most once: row; rate, finite and below 0 (-1 by
    temperature); k, 0 or below the vocabulary's size; p; least weight (min_p * unit); uniform.
    ``block`` and ``room`` are powers of two that change the time alone.
    """
    num_draws, vocab = draws.shape[0], scores.shape[1]
    assert scores.stride(1) == 1, "a row's scores stand side by side"
    noted = torch.empty(2, num_draws, room, dtype=torch.int32, device=scores.device)
    _draw[(num_draws,)](
        scores,
        best,
        draws,
        noted[0],
        noted[1],
        token_ids,
        scores.stride(0),
        VOCAB=vocab,
        CHUNKS=triton.next_power_of_2(triton.cdiv(vocab, block)),
        UNIT=unit,
        BLOCK=block,
        ROOM=room,
        num_warps=NUM_WARPS,
    )
