"""The highest numbers of short rows, as a router of experts asks for them.

torch's own selection is made for long rows: two launches of 10 us on an H200 for some rows of 128
numbers.
"""

from __future__ import annotations

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SIZE = 1024
"""Numbers in a row."""
MAX_K = 32


@triton.jit
def top_k_kernel(
    x,  # [rows, SIZE]
    values,  # [rows, K], out
    index,  # [rows, K] int64, out
    SIZE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Highest first; of equal ones that which stands first; nan is as high as
    infinity. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    found = tl.load(x + row * SIZE + columns, mask=columns < SIZE, other=0.0)
    # Each is taken once, whatever it is: -inf is for those that are taken, and for none else.
    lowest = -3.4028234663852886e38
    rest = found.to(tl.float32)
    rest = tl.where(rest != rest, float("inf"), tl.maximum(rest, lowest))
    rest = tl.where(columns < SIZE, rest, float("-inf"))
    for i in tl.static_range(K):
        _, place = tl.max(rest, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(index + row * K + i, place.to(tl.int64))
        here = columns == place
        tl.store(values + row * K + i + tl.zeros((BLOCK,), tl.int32), found, mask=here)
        rest = tl.where(here, float("-inf"), rest)


_top_k: Any = top_k_kernel


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x ``[…, size]`` -> values and index (int64) ``[…, k]``, highest first."""
    size = x.shape[-1]
    assert k <= size <= MAX_SIZE, "the row is for another kernel"
    values = x.new_empty(*x.shape[:-1], k)
    index = torch.empty_like(values, dtype=torch.int64)
    block = triton.next_power_of_2(size)
    _top_k[(values.numel() // k,)](
        x.contiguous(), values, index, SIZE=size, K=k, BLOCK=block,
        num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
    return values, index
