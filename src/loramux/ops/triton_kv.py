"""New keys and values into their places of the paged cache, in one launch a layer."""

from __future__ import annotations

from typing import Any

# Kernels are Triton, not Python: constants and ranges have other types than a checker thinks.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kernel(
    k,  # [T, heads, K_DIM]
    v,  # [T, heads, V_DIM]
    keys,  # [cache rows, heads * K_DIM]
    values,  # [cache rows, heads * V_DIM]
    cache_rows,  # [T]
    k_stride_row,
    k_stride_head,
    v_stride_row,
    v_stride_head,
    NUM_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """One token a program."""
    row = tl.program_id(0).to(tl.int64)
    cache_row = tl.load(cache_rows + row)
    i = tl.arange(0, K_BLOCK)
    source = k + row * k_stride_row + i // K_DIM * k_stride_head + i % K_DIM
    k_mask = i < NUM_HEADS * K_DIM
    tl.store(keys + cache_row * NUM_HEADS * K_DIM + i, tl.load(source, mask=k_mask), mask=k_mask)
    j = tl.arange(0, V_BLOCK)
    source = v + row * v_stride_row + j // V_DIM * v_stride_head + j % V_DIM
    v_mask = j < NUM_HEADS * V_DIM
    tl.store(values + cache_row * NUM_HEADS * V_DIM + j, tl.load(source, mask=v_mask), mask=v_mask)


# Launch options are no parameters of the kernel, so a type checker cannot know them.
_write: Any = _write_kernel


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cache_rows: Tensor) -> None:
    """Semantics: keys.rows[cache_rows[t]] = k[t], values.rows[cache_rows[t]] = v[t].

    k ``[T, heads, key dim]`` and v ``[T, heads, value dim]``, whose innermost stride is 1; keys and
    values are contiguous ``[blocks, block size, heads, dim]``, and a row is one place of a block;
    cache_rows ``[T or more]`` int64.
    """
    assert k.stride(2) == v.stride(2) == 1, "a head's numbers stand side by side"
    num_heads, k_dim, v_dim = k.shape[1], k.shape[2], v.shape[2]
    _write[(k.shape[0],)](
        k,
        v,
        keys,
        values,
        cache_rows,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BLOCK=triton.next_power_of_2(num_heads * k_dim),
        V_BLOCK=triton.next_power_of_2(num_heads * v_dim),
        num_warps=4,
    )
