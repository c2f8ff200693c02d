"""Backends with the Triton kernels on any device, for engines in tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch._dynamo.testing import CompileCounter

from loramux.config import BLOCK_SIZE, EngineOptions, StepLimits
from loramux.lora.segments import padded_rows
from loramux.model.anatomy import Anatomy
from loramux.model.load import BaseModel
from loramux.ops.triton_lora import TritonOps
from loramux.ops.upload import Uploads
from loramux.worker.backends import Backends, choose_backends
from loramux.worker.captured_runner import CompiledOptions
from tests.cpu.test_compiled_layers import OpaqueAttention


def called_backends(
    model: BaseModel, anatomy: Anatomy, limits: StepLimits, options: EngineOptions
) -> Backends:
    """The kernels, called by the model as it is."""
    return replace(
        choose_backends(model, anatomy, limits, options), ops=_ops(model, limits, options)
    )


def compiled_backends(
    model: BaseModel, anatomy: Anatomy, limits: StepLimits, options: EngineOptions
) -> Backends:
    """The kernels in compiled layers; what the compiler finds is executed by torch."""
    torch._dynamo.reset()
    ops, device = _ops(model, limits, options), model.model.device
    compiled = CompiledOptions(
        ops, Uploads(device), limits.max_num_seqs, compiler=CompileCounter(), capture=False
    )

    def attention(num_blocks: int) -> OpaqueAttention:
        return OpaqueAttention(anatomy.attention, num_blocks, BLOCK_SIZE, model.dtype, device)

    return Backends(attention, ops, ops.workspace_bytes, compiled)


def _ops(model: BaseModel, limits: StepLimits, options: EngineOptions) -> TritonOps:
    return TritonOps(
        padded_rows=padded_rows(options.adapters.max_loras, limits.max_step_tokens),
        max_rank=options.adapters.max_rank,
        device=model.model.device,
    )
