"""Singular values of an adapter's deltas, without ever forming one."""

from __future__ import annotations

import torch
from torch import Tensor


def singular_values(a: Tensor, b: Tensor, scale: float) -> tuple[float, ...]:
    """Those of ``scale * B A``, largest first, in float64; a ``[r, in]``, b ``[out, r]``.

    With ``B = Q R`` and ``A^T = P S`` they are those of ``R S^T``, a matrix of at most r by r,
    since Q and P keep lengths.
    """
    r = torch.linalg.qr(b.double(), mode="r").R
    s = torch.linalg.qr(a.double().T, mode="r").R
    return tuple((torch.linalg.svdvals(r @ s.T) * abs(scale)).tolist())
