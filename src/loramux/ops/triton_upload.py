"""Moves the parts of one block of memory to their places."""

from __future__ import annotations

from typing import Any

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _place_kernel(block, chunks, CHUNK: tl.constexpr):
    """One chunk a program, in words of four bytes."""
    chunk = chunks + tl.program_id(0) * 3
    target = tl.load(chunk).to(tl.pointer_type(tl.int32))
    source = (block + tl.load(chunk + 1)).to(tl.pointer_type(tl.int32))
    num_words = tl.load(chunk + 2) // 4
    i = tl.arange(0, CHUNK)
    tl.store(target + i, tl.load(source + i, mask=i < num_words), mask=i < num_words)


# Launch options are no parameters of the kernel, so a type checker cannot know them.
_place: Any = _place_kernel


def place_chunks(block: Tensor, chunks: Tensor, max_bytes: int) -> None:
    """Copy parts of ``block`` (uint8) to the addresses that ``chunks`` names.

    chunks ``[n, 3]`` int64: target's address, first byte in the block, number of bytes (of whole
    words of four, at most ``max_bytes``).
    """
    _place[(chunks.shape[0],)](block, chunks, CHUNK=max_bytes // 4, num_warps=4)
