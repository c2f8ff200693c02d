"""Paged attention in plain torch, for CPUs and for what has no better backend.

Sequences that add one token are computed together, gathered from their blocks and padded to a
common length; sequences that add more are computed one by one. The padded length of a sequence
depends on that sequence alone, so who else takes part does not change its result.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.ops.attention import (
    Attend,
    AttentionLayer,
    AttentionParams,
    AttentionSequence,
    StepKind,
)

_CPU = torch.device("cpu")


class _Group:
    """Sequences of one padded length that are computed by one call."""

    def __init__(
        self, rows: slice | Tensor, num_queries: int, positions: Tensor, cache_rows: Tensor
    ) -> None:
        self.rows = rows
        """Rows of the step, sequence by sequence."""
        self.num_queries = num_queries
        self.cache_rows = cache_rows
        """``[B, L]``: cache row of each key. Padding is masked and repeats the sequence's own first
        key: a masked key still counts where it is not finite, and that must hit nobody else."""
        self._positions = positions
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """``[B, 1, Q, L]`` bool: which keys each query sees."""
        if window not in self._masks:
            keys = torch.arange(self.cache_rows.shape[1], device=self.cache_rows.device)
            distance = self._positions[:, :, None] - keys
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self._masks[window] = seen[:, None]
        return self._masks[window]


class TorchAttention:
    """Cache rows are ``block * block_size + place in the block``."""

    name = "torch"

    def __init__(
        self,
        layers: Mapping[int, AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:
        self._device = device
        self._block_size = block_size
        rows = num_blocks * block_size
        # Two dimensions, because index_select of rows is three times faster than indexing.
        self._params = {i: layer.params for i, layer in layers.items()}
        self._keys = {
            i: torch.zeros(rows, s.num_kv_heads * s.key_dim, dtype=dtype, device=device)
            for i, s in ((i, layer.kv) for i, layer in layers.items())
        }
        self._values = {
            i: torch.zeros(rows, s.num_kv_heads * s.value_dim, dtype=dtype, device=device)
            for i, s in ((i, layer.kv) for i, layer in layers.items())
        }
        self._write_rows = torch.empty(0, dtype=torch.long)
        self._groups: list[_Group] = []

    @property
    def kv_bytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))

    def begin_step(
        self,
        sequences: Sequence[AttentionSequence],
        num_rows: int | None = None,
        kind: StepKind = StepKind.EAGER,
    ) -> None:
        assert num_rows is None, "this backend has no spare block for padding"
        assert kind is StepKind.EAGER, "nothing can be captured with this backend"
        tables = [self._cache_rows(s) for s in sequences]
        self._write_rows = torch.cat(
            [t[s.num_cached :] for s, t in zip(sequences, tables, strict=True)]
        ).to(self._device)
        decodes: defaultdict[int, list[tuple[AttentionSequence, Tensor]]] = defaultdict(list)
        self._groups = []
        for sequence, table in zip(sequences, tables, strict=True):
            if sequence.num_tokens == 1:
                decodes[_padded_length(len(table))].append((sequence, table))
            else:
                self._groups.append(_prefill_group(sequence, table, self._device))
        self._groups += [
            _decode_group(length, group, self._device) for length, group in decodes.items()
        ]

    def layer(self, layer: int) -> Attend:
        return functools.partial(self._attend_layer, layer)

    def _attend_layer(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        params = self._params[layer]
        keys, values = self._keys[layer], self._values[layer]
        keys.index_copy_(0, self._write_rows, k.reshape(k.shape[0], -1))
        values.index_copy_(0, self._write_rows, v.reshape(v.shape[0], -1))
        num_heads, value_dim = q.shape[1], v.shape[2]
        out = q.new_empty(q.shape[0], num_heads, value_dim)
        for group in self._groups:
            gathered_k = _gather(keys, group.cache_rows, k.shape[1])
            gathered_v = _gather(values, group.cache_rows, v.shape[1])
            queries = q[group.rows].reshape(-1, group.num_queries, num_heads, q.shape[2])
            answer = _attend(queries, gathered_k, gathered_v, group.mask(params.window), params)
            out[group.rows] = answer.reshape(-1, num_heads, value_dim)
        return out

    def _cache_rows(self, sequence: AttentionSequence) -> Tensor:
        """Cache row of every token of a sequence, cached and new, ``[L]``."""
        length = sequence.num_cached + sequence.num_tokens
        blocks = torch.from_numpy(np.array(sequence.block_table, dtype=np.int64))
        places = torch.arange(self._block_size)
        return (blocks[:, None] * self._block_size + places).flatten()[:length]


def _gather(cache: Tensor, rows: Tensor, num_heads: int) -> Tensor:
    """``[B, L]`` rows of a cache as ``[B, heads, L, dim]``."""
    batch, length = rows.shape
    found = cache.index_select(0, rows.view(-1))
    return found.view(batch, length, num_heads, -1).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """q ``[B, Q, heads, dim]``, k and v ``[B, kv heads, L, dim]`` -> ``[B, Q, heads, dim]``."""
    batch, num_queries, num_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    per_kv_head = num_heads // num_kv_heads
    # Query heads of one key head become query rows of it, so that keys are not repeated.
    rows = q.view(batch, num_queries, num_kv_heads, per_kv_head, -1).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, num_kv_heads, per_kv_head * num_queries, -1)
    if num_queries > 1:
        mask = mask.repeat(1, 1, per_kv_head, 1)
    if params.softcap is None and params.sinks is None and k.shape[3] == v.shape[3]:
        answer = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=params.scale)
    else:
        # One sequence at a time: how many there are can change the last bits of a batched product.
        answer = torch.stack(
            [_attend_plainly(*one, params) for one in zip(rows, k, v, mask, strict=True)]
        )
    answer = answer.view(batch, num_kv_heads, per_kv_head, num_queries, -1)
    return answer.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, -1)


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams
) -> Tensor:
    """What scaled_dot_product_attention has no fast kernel for; one sequence, ``[heads, …]``."""
    scores = (q @ k.transpose(1, 2)) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    length = scores.shape[2]
    if params.sinks is not None:
        scores = torch.cat([scores, _sinks_beside(scores, params.sinks)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length]
    return weights.to(v.dtype) @ v


def _sinks_beside(scores: Tensor, sinks: Sequence[float]) -> Tensor:
    """``[kv heads, rows, 1]``; the rows of a key head are those of its query heads in turn."""
    num_kv_heads, num_rows, _ = scores.shape
    by_head = torch.tensor(sinks, dtype=scores.dtype, device=scores.device)
    by_head = by_head.view(num_kv_heads, -1, 1)
    return by_head.repeat_interleave(num_rows // by_head.shape[1], dim=1)


def _padded_length(length: int) -> int:
    """Round up in steps of an eighth or more of the length, so that few groups waste little."""
    step = max(64, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _decode_group(
    length: int, members: Sequence[tuple[AttentionSequence, Tensor]], device: torch.device
) -> _Group:
    rows = torch.tensor([s.first_row for s, _ in members], dtype=torch.long)
    cache_rows = torch.empty(len(members), length, dtype=torch.long)
    for i, (_, table) in enumerate(members):
        cache_rows[i, : len(table)] = table
        cache_rows[i, len(table) :] = table[0]
    positions = torch.tensor([[s.num_cached] for s, _ in members])
    return _Group(rows.to(device), 1, positions.to(device), cache_rows.to(device))


def _prefill_group(sequence: AttentionSequence, table: Tensor, device: torch.device) -> _Group:
    rows = slice(sequence.first_row, sequence.first_row + sequence.num_tokens)
    positions = torch.arange(sequence.num_cached, len(table))[None]
    return _Group(rows, sequence.num_tokens, positions.to(device), table[None].to(device))
