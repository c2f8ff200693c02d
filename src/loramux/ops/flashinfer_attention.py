"""Paged attention on CUDA by FlashInfer's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flashinfer import (  # pyright: ignore[reportMissingImports]
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from torch import Tensor, nn

from loramux.ops.attention import Attend, AttentionLayer, AttentionSequence, StepKind
from loramux.ops.opaque import attend, register_attention
from loramux.ops.pages import Pages
from loramux.ops.triton_kv import write_kv
from loramux.ops.upload import Uploads

_WORKSPACE_BYTES = 128 * 2**20
"""For partial results of sequences that are split; what FlashInfer recommends."""
_PLAN_BYTES = 8 * 2**20
_TENSOR_CORES_FROM = 4
"""Query heads of one key head from which on FlashInfer's tensor-core kernel decodes faster."""


class FlashInferAttention:
    """Implements ``ops.attention.AttentionBackend``.

    Keys and values of a layer are ``[blocks + 1, block size, kv heads, dim]``; the last block is
    spare, for padding. Layers that differ in no parameter share FlashInfer's plan of a step.
    """

    name = "flashinfer"

    def __init__(
        self,
        layers: Mapping[int, AttentionLayer],
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        uploads: Uploads,
        max_model_len: int,
        max_num_seqs: int,
        max_step_tokens: int,
    ) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._uploads = uploads
        self._spare_block = num_blocks
        self._groups = list(dict.fromkeys(layers.values()))
        number = register_attention(self)

        def cache(num_heads: int, dim: int) -> Tensor:
            shape = (num_blocks + 1, block_size, num_heads, dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._cache_rows = torch.zeros(max_step_tokens, dtype=torch.int64, device=device)
        self._layers = {
            i: _Layer(
                cache(layer.kv.num_kv_heads, layer.kv.key_dim),
                cache(layer.kv.num_kv_heads, layer.kv.value_dim),
                number,
                self._groups.index(layer),
            )
            for i, layer in layers.items()
        }
        # Captured graphs hold its address, so it is made for the most that a step can name: as many
        # of the longest sequences as there can be, which may share all their blocks and so be more
        # than the cache has, and the spare one for each row of padding.
        most = max_num_seqs * -(-max_model_len // block_size) + max_step_tokens
        self._blocks = torch.zeros(most, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans = [
            torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device) for _ in self._groups
        ]
        """One a group, for all its buckets, of which one is in use at a time."""
        self._prefill: list[Any] = [
            BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD") for _ in self._groups
        ]
        self._decode: dict[tuple[int, int], Any] = {}
        """By group and number of sequences."""
        self._mixed: dict[tuple[int, int], Any] = {}
        """By group and number of rows."""
        self._max_sequences = max_num_seqs + 1  # and the padding
        self._active: list[Any] = []
        self._planned = torch.cuda.Event()

    @property
    def kv_bytes(self) -> int:
        """Device memory of all keys and values."""
        return sum(layer.num_bytes for layer in self._layers.values())

    @staticmethod
    def supports(layers: Mapping[int, AttentionLayer], dtype: torch.dtype) -> bool:
        """Whether FlashInfer has kernels for these layers."""
        return dtype in (torch.bfloat16, torch.float16) and all(
            layer.kv.key_dim == layer.kv.value_dim
            and layer.kv.key_dim in (64, 128, 256)
            and layer.params.sinks is None
            for layer in layers.values()
        )

    def layer(self, layer: int) -> Attend:
        return self._layers[layer]

    def begin_step(
        self,
        sequences: Sequence[AttentionSequence],
        num_rows: int | None = None,
        kind: StepKind = StepKind.EAGER,
    ) -> None:
        # FlashInfer copies a plan from a pinned buffer of its own, which the last step's copies
        # must have left. They stand at the beginning of that step, so this hardly ever waits.
        self._planned.synchronize()
        used_rows = sum(s.num_tokens for s in sequences)
        num_padding = 0 if num_rows is None else num_rows - used_rows
        sequences = [*sequences, *self._padding(used_rows, num_padding, kind)]
        pages = Pages.of(sequences, self._block_size)
        self._uploads.copy(self._cache_rows, pages.new_rows())
        self._uploads.copy(self._blocks, pages.blocks)
        self._active = [self._plan(group, pages, kind) for group in range(len(self._groups))]
        self._planned.record()

    def _padding(self, row: int, num_rows: int, kind: StepKind) -> list[AttentionSequence]:
        """Sequences in the spare block for rows that nobody reads."""
        if kind is StepKind.DECODE:
            spare = AttentionSequence(row, 1, 0, (self._spare_block,))
            return [spare] * num_rows
        blocks = (self._spare_block,) * -(-num_rows // self._block_size)
        return [AttentionSequence(row, num_rows, 0, blocks)] if num_rows else []

    def attend_group(
        self, group: int, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Carries out ``ops.opaque.attend`` for a layer of a group."""
        write_kv(k, v, keys, values, self._cache_rows)
        return self._active[group].run(q.contiguous(), (keys, values))

    def _plan(self, group: int, pages: Pages, kind: StepKind) -> Any:
        """FlashInfer's wrapper that computes a group's layers in this step."""
        if kind is StepKind.EAGER:
            return self._plan_prefill(self._prefill[group], group, pages)
        if kind is StepKind.MIXED:
            return self._plan_mixed(group, pages)
        return self._plan_decode(group, pages)

    def _plan_decode(self, group: int, pages: Pages) -> Any:
        bucket = len(pages.last_block_tokens)
        if (group, bucket) not in self._decode:
            self._decode[group, bucket] = self._new_decode(group, bucket)
        wrapper = self._decode[group, bucket]
        wrapper.plan(
            self._uploads.stage(pages.block_start),
            # A view of the buffer that the kernel reads, so that nothing goes by way of the host.
            self._blocks[: len(pages.blocks)],
            self._uploads.stage(pages.last_block_tokens),
            **self._plan_options(group),
        )
        return wrapper

    def _new_decode(self, group: int, bucket: int) -> Any:
        layer = self._groups[group]
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=layer.num_heads // layer.kv.num_kv_heads >= _TENSOR_CORES_FROM,
            paged_kv_indptr_buffer=torch.zeros(bucket + 1, dtype=torch.int32, device=self._device),
            paged_kv_indices_buffer=self._blocks,
            paged_kv_last_page_len_buffer=torch.ones(
                bucket, dtype=torch.int32, device=self._device
            ),
        )
        wrapper.reset_workspace_buffer(self._workspace, self._plans[group])
        return wrapper

    def _plan_mixed(self, group: int, pages: Pages) -> Any:
        num_rows = int(pages.row_start[-1])
        if (group, num_rows) not in self._mixed:
            self._mixed[group, num_rows] = self._new_mixed(group)
        padded = pages.padded(self._max_sequences)
        return self._plan_prefill(self._mixed[group, num_rows], group, padded)

    def _new_mixed(self, group: int) -> Any:
        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=zeros(self._max_sequences + 1),
            paged_kv_indptr_buf=zeros(self._max_sequences + 1),
            paged_kv_indices_buf=self._blocks,
            paged_kv_last_page_len_buf=zeros(self._max_sequences),
        )
        wrapper.reset_workspace_buffer(self._workspace, self._plans[group])
        return wrapper

    def _plan_prefill(self, wrapper: Any, group: int, pages: Pages) -> Any:
        options = self._plan_options(group)
        options["head_dim_qk"] = options.pop("head_dim")
        wrapper.plan(
            self._uploads.stage(pages.row_start),
            self._uploads.stage(pages.block_start),
            self._blocks[: len(pages.blocks)],
            self._uploads.stage(pages.last_block_tokens),
            causal=True,
            # Said here because FlashInfer would go through them one by one in Python.
            max_token_per_sequence=int(np.diff(pages.row_start).max()),
            **options,
        )
        return wrapper

    def _plan_options(self, group: int) -> dict[str, Any]:
        layer = self._groups[group]
        window, softcap = layer.params.window, layer.params.softcap
        return {
            "num_qo_heads": layer.num_heads,
            "num_kv_heads": layer.kv.num_kv_heads,
            "head_dim": layer.kv.key_dim,
            "page_size": self._block_size,
            "sm_scale": layer.params.scale,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }


class _Layer(nn.Module):
    """A layer's keys and values, and the op that writes and reads them."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, backend: int, group: int) -> None:
        super().__init__()
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("values", values, persistent=False)
        self.num_bytes = keys.nbytes + values.nbytes
        self.backend = backend
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.keys, self.values, self.backend, self.group)
