"""Linears as they run: those that read the same input become one (q/k/v, gate/up, …).

Which ones is found by the examination of the model, not by a list of architectures, so every
model gains. The modelling code stays as it is: it still calls each member, in the order that was
seen; the first call computes all of them and the others pick their part up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def lay_out_for_cpu(linear: nn.Linear) -> None:
    """Turn a float32 weight round in memory (``[in, out]``); its shape and values stay.

    With few rows of x, the CPU's product reads such a weight up to twice as fast. bfloat16 gains
    nothing, and an accelerator's kernels want rows as they are.
    """
    weight = linear.weight
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        linear.weight = nn.Parameter(weight.t().contiguous().t(), requires_grad=False)


def fuse(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear with the rows of all, in order; their weights become views of its weight."""
    first = linears[0]
    sizes = [linear.out_features for linear in linears]
    has_bias = any(linear.bias is not None for linear in linears)
    fused = nn.Linear(first.in_features, sum(sizes), bias=has_bias, device="meta")
    fused.weight = nn.Parameter(torch.cat([li.weight for li in linears]), requires_grad=False)
    lay_out_for_cpu(fused)  # before the members' views are made
    for linear, rows in zip(linears, fused.weight.split(sizes), strict=True):
        linear.weight = nn.Parameter(rows, requires_grad=False)
    if has_bias:
        biases = [
            li.weight.new_zeros(li.out_features) if li.bias is None else li.bias for li in linears
        ]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


class OtherMember(nn.Module):
    """Stands for a member after the first: hands out what the first call left here."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        part, self.part = self.part, None
        assert part is not None, "the first member of a fused linear was not called"
        return part


class FirstMember(nn.Module):
    """Stands for the first member: computes the fused linear and leaves the others their parts."""

    def __init__(
        self, linear: nn.Module, sizes: Sequence[int], others: Sequence[OtherMember]
    ) -> None:
        super().__init__()
        self.linear = linear
        self._sizes = list(sizes)
        # A tuple, so that the others are not registered as modules of this one, too.
        self._others = tuple(others)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.linear(x).split(self._sizes, dim=-1)
        for member, part in zip(self._others, rest, strict=True):
            member.part = part
        return first
