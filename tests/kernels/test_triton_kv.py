"""Writing to the cache against plain indexing."""

from __future__ import annotations

import pytest
import torch

from loramux.ops.triton_kv import write_kv


@pytest.mark.parametrize("heads", [(2, 8, 8), (3, 24, 16), (1, 64, 64)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_keys_and_values_come_to_their_rows(
    num_rows: int, heads: tuple[int, int, int], device: torch.device
) -> None:
    num_heads, k_dim, v_dim = heads
    keys = torch.randn(4, 16, num_heads, k_dim, device=device)
    values = torch.randn(4, 16, num_heads, v_dim, device=device)
    # As in a model: parts of one fused output, whose rows lie further apart.
    fused = torch.randn(num_rows, num_heads * (k_dim + v_dim), device=device)
    k = fused[:, : num_heads * k_dim].view(num_rows, num_heads, k_dim)
    v = fused[:, num_heads * k_dim :].view(num_rows, num_heads, v_dim)
    rows = torch.tensor([40, 3, 63, 17, 0, 9, 9], device=device)  # more than there are tokens
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys.view(64, num_heads, k_dim)[rows[:num_rows]] = k
    wanted_values.view(64, num_heads, v_dim)[rows[:num_rows]] = v
    write_kv(k, v, keys, values, rows)
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
