"""Puts an engine together; the only place that names concrete parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loramux.adapters.catalog import Catalog
from loramux.config import BLOCK_SIZE, EngineOptions, parse_bytes
from loramux.engine.admission import Admission
from loramux.engine.admission import Limits as RequestLimits
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.core import EngineCore
from loramux.engine.text import HFText
from loramux.errors import ConfigError, ModelNotServable
from loramux.lora.segments import max_padded_rows
from loramux.lora.weights import block_bytes
from loramux.model.anatomy import Anatomy, examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import BaseModel, load_base
from loramux.ops.interface import LoraOps
from loramux.ops.reference import ReferenceOps
from loramux.ops.stacked import StackedOps
from loramux.ops.torch_attention import TorchAttention
from loramux.scheduling.scheduler import Limits
from loramux.types import Slot
from loramux.worker.self_check import self_check
from loramux.worker.worker import Worker

log = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 2 * 2**30
_FIRST_RANK = 16
"""Rank that workspaces are for until an adapter needs more."""
_DEFAULT_RANK = 64
"""The default arena holds ``max_loras`` adapters of this rank on every linear."""


@dataclass(frozen=True)
class Parts:
    """A built engine without a thread."""

    core: EngineCore
    worker: Worker
    admission: Admission
    text: HFText
    base_name: str


def build_async_engine(
    base: str,
    options: EngineOptions | None = None,
    adapters: Mapping[str, str] | None = None,
    served_name: str | None = None,
) -> AsyncEngine:
    """An engine that ``await engine.start()`` sets going. Raises ConfigError, ModelNotServable."""
    options = options or EngineOptions()
    parts = build_parts(base, options, served_name)
    return AsyncEngine(
        parts.core,
        parts.worker,
        parts.admission,
        parts.text,
        base_name=parts.base_name,
        max_open=options.scheduler.max_waiting + options.scheduler.max_num_seqs,
        adapters=tuple((adapters or {}).items()),
    )


def build_parts(base: str, options: EngineOptions, served_name: str | None = None) -> Parts:
    """Load a base model and its tokenizer and build an engine. Raises as above."""
    model = load_base(base, options.model)
    return assemble(model, _load_tokenizer(model.name), options, served_name or base)


def assemble(
    model: BaseModel,
    tokenizer: PreTrainedTokenizerBase,
    options: EngineOptions,
    base_name: str,
    *,
    runs_ahead: bool = False,
) -> Parts:
    """Build an engine around a model that is in memory. Raises as above."""
    seam = AttentionSeam(model.model)
    anatomy = examine(model, seam)
    num_slots = options.adapters.max_loras
    num_blocks = _num_blocks(model, anatomy, options)
    arena_bytes = _arena_bytes(model, anatomy, options)
    backend = TorchAttention(
        {layer: shape for layer, (shape, _) in anatomy.attention.items()},
        num_blocks,
        BLOCK_SIZE,
        model.dtype,
        model.model.device,
    )
    ops = choose_ops(model, num_slots, options.scheduler.max_step_tokens)
    worker = Worker(
        model,
        anatomy,
        seam,
        backend,
        ops,
        num_slots=num_slots,
        arena_bytes=arena_bytes,
        max_step_tokens=options.scheduler.max_step_tokens,
        max_rank=options.adapters.max_rank,
        runs_ahead=runs_ahead,
    )
    if options.model.self_check:
        worst = self_check(
            model,
            worker,
            seam,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_step_tokens=options.scheduler.max_step_tokens,
            base_slot=Slot(num_slots),
        )
        log.info("self-check passed: logits within %.1e standard deviations", worst)
    text = HFText(tokenizer)
    catalog = Catalog(base_name)
    core = EngineCore(
        worker,
        text,
        catalog,
        limits=Limits(
            max_num_seqs=options.scheduler.max_num_seqs,
            max_step_tokens=options.scheduler.max_step_tokens,
            block_size=BLOCK_SIZE,
        ),
        num_blocks=num_blocks,
        num_slots=num_slots,
        arena_bytes=arena_bytes,
        eos_token_ids=model.eos_token_ids,
    )
    admission = Admission(catalog, RequestLimits(model.max_model_len, model.vocab_size))
    log.info(
        "serving %s: %s, %s attention, %s LoRA op, %d slots (%.0f MB), %d KV blocks of %d tokens",
        base_name,
        str(model.dtype).removeprefix("torch."),
        backend.name,
        ops.name,
        num_slots,
        arena_bytes / 1e6,
        num_blocks,
        BLOCK_SIZE,
    )
    return Parts(core, worker, admission, text, base_name)


def choose_ops(model: BaseModel, num_slots: int, max_step_tokens: int) -> LoraOps:
    """The LoRA backend for the model's device and dtype."""
    if model.model.device.type == "cuda":
        from loramux.ops.triton_lora import TritonOps

        return TritonOps(
            max_padded_rows=max_padded_rows(num_slots, max_step_tokens),
            max_rank=_FIRST_RANK,
            device=model.model.device,
        )
    # float32 products start fast enough for one after the other.
    return StackedOps() if model.dtype == torch.bfloat16 else ReferenceOps()


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotServable(path, f"its tokenizer cannot be read: {error}") from error


def _num_blocks(model: BaseModel, anatomy: Anatomy, options: EngineOptions) -> int:
    per_token = sum(
        shape.num_kv_heads * (shape.key_dim + shape.value_dim) * model.dtype.itemsize
        for shape, _ in anatomy.attention.values()
    )
    per_block = per_token * BLOCK_SIZE
    per_sequence = -(-model.max_model_len // BLOCK_SIZE)
    if options.scheduler.kv_cache is not None:
        num_blocks = parse_bytes(options.scheduler.kv_cache) // per_block
    else:
        wanted = options.scheduler.max_num_seqs * per_sequence
        num_blocks = min(wanted, _DEFAULT_KV_BYTES // per_block)
    if num_blocks < per_sequence:
        raise ConfigError(
            f"the KV cache holds {num_blocks * BLOCK_SIZE} tokens and one sequence may have "
            f"{model.max_model_len}: start with --kv-cache {per_sequence * per_block} or more, or "
            f"with --max-model-len {max(num_blocks * BLOCK_SIZE, 1)} or less"
        )
    return num_blocks


def _arena_bytes(model: BaseModel, anatomy: Anatomy, options: EngineOptions) -> int:
    if options.adapters.device_cache is not None:
        return parse_bytes(options.adapters.device_cache)
    one = block_bytes(anatomy.modules.shapes, _DEFAULT_RANK, model.dtype)
    return options.adapters.max_loras * one
