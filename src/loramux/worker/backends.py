"""Which kernels a model gets: attention and the LoRA op, by device and dtype."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from loramux.config import BLOCK_SIZE, EngineOptions, StepLimits
from loramux.errors import ConfigError
from loramux.lora.segments import padded_rows
from loramux.model.anatomy import Anatomy
from loramux.model.load import BaseModel
from loramux.ops.attention import AttentionBackend, AttentionLayer
from loramux.ops.interface import LoraOps
from loramux.ops.reference import ReferenceOps
from loramux.ops.stacked import StackedOps
from loramux.ops.torch_attention import TorchAttention
from loramux.ops.tuning import tile_chooser
from loramux.ops.upload import Uploads
from loramux.worker.captured_runner import CompiledOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backends:
    """What computes attention and LoRA."""

    attention: Callable[[int], AttentionBackend]
    """Makes one with a cache of so many blocks."""
    ops: LoraOps
    workspace_bytes: int = 0
    """Of the LoRA op."""
    compiled: CompiledOptions | None = None
    """Given where layers are compiled and decode steps captured."""


def choose_backends(
    model: BaseModel, anatomy: Anatomy, limits: StepLimits, options: EngineOptions
) -> Backends:
    """The best for the model's device and dtype."""
    if model.model.device.type == "cuda":
        return _cuda_backends(model, anatomy.attention, limits, options)
    if options.adapters.tuning is not None:
        raise ConfigError("a tuning table is for a GPU's kernels: leave --tuning out on a CPU")
    if model.dtype == torch.bfloat16 and not cpu_has_bfloat16():
        log.warning(
            "this CPU has no instructions for bfloat16, in which it takes several times as long as "
            "in float32: start with --dtype float32, which takes twice the memory"
        )
    # float32 products start fast enough for one after the other.
    ops = StackedOps() if model.dtype == torch.bfloat16 else ReferenceOps()
    return Backends(_torch_attention(model, anatomy.attention), ops)


def cpu_has_bfloat16() -> bool:
    """Whether products of bfloat16 are computed as such; else they go number by number."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _cuda_backends(
    model: BaseModel,
    layers: Mapping[int, AttentionLayer],
    limits: StepLimits,
    options: EngineOptions,
) -> Backends:
    from loramux.ops.triton_lora import TritonOps

    device = model.model.device
    ops = TritonOps(
        padded_rows=padded_rows(options.adapters.max_loras, limits.max_step_tokens),
        max_rank=options.adapters.max_rank,
        device=device,
        chooser=tile_chooser(torch.cuda.get_device_name(device), options.adapters.tuning),
    )
    objection = no_flashinfer_because(layers, model.dtype)
    if objection is not None:
        log.warning(
            "%s: attention runs in torch, without CUDA graphs, several times slower", objection
        )
        return Backends(_torch_attention(model, layers), ops, ops.workspace_bytes)
    from loramux.ops.flashinfer_attention import FlashInferAttention

    uploads = Uploads(device)
    attention = partial(
        FlashInferAttention,
        layers,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=device,
        uploads=uploads,
        max_model_len=model.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_step_tokens=limits.max_step_tokens,
    )
    compiled = CompiledOptions(ops, uploads, limits.max_num_seqs)
    return Backends(attention, ops, ops.workspace_bytes, compiled)


def no_flashinfer_because(layers: Mapping[int, AttentionLayer], dtype: torch.dtype) -> str | None:
    """Why attention cannot be FlashInfer's, with the remedy where there is one; None if it can."""
    try:
        from loramux.ops.flashinfer_attention import FlashInferAttention
    except ImportError:
        return "FlashInfer is not installed (pip install 'loramux[cuda]')"
    if not FlashInferAttention.supports(layers, dtype):
        return "FlashInfer has no kernels for this model's heads, sinks or dtype (use bfloat16)"
    return None


def _torch_attention(
    model: BaseModel, layers: Mapping[int, AttentionLayer]
) -> Callable[[int], AttentionBackend]:
    return partial(
        TorchAttention,
        layers,
        block_size=BLOCK_SIZE,
        dtype=model.dtype,
        device=model.model.device,
    )
