"""Puts an engine together; the only place that names concrete parts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loramux.adapters.catalog import Catalog
from loramux.config import BLOCK_SIZE, EngineOptions, parse_bytes
from loramux.engine.admission import Admission
from loramux.engine.admission import Limits as RequestLimits
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.core import EngineCore
from loramux.engine.text import HFText
from loramux.errors import ConfigError, ModelNotServable
from loramux.lora.segments import padded_rows
from loramux.lora.weights import block_bytes
from loramux.model.anatomy import Anatomy, examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import BaseModel, load_base
from loramux.ops.attention import AttentionBackend, AttentionLayer
from loramux.ops.interface import LoraOps
from loramux.ops.reference import ReferenceOps
from loramux.ops.stacked import StackedOps
from loramux.ops.torch_attention import TorchAttention
from loramux.ops.tuning import tile_chooser
from loramux.ops.upload import Uploads
from loramux.scheduling.scheduler import Limits
from loramux.types import Slot
from loramux.worker.graphs import GraphKey
from loramux.worker.runner import CompiledOptions
from loramux.worker.self_check import self_check
from loramux.worker.worker import Worker

log = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 2 * 2**30
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
    """Build an engine around a model that is in memory. Raises as above.

    ``runs_ahead``: launch a step before the one before is known, also where that gains nothing.
    """
    seam = AttentionSeam(model.model)
    anatomy = examine(model, seam)
    num_slots = options.adapters.max_loras
    num_blocks = _num_blocks(model, anatomy, options)
    arena_bytes = _arena_bytes(model, anatomy, options)
    backends = choose_backends(model, anatomy, num_blocks, options)
    worker = Worker(
        model,
        anatomy,
        seam,
        backends.attention,
        backends.ops,
        num_slots=num_slots,
        arena_bytes=arena_bytes,
        max_step_tokens=options.scheduler.max_step_tokens,
        max_rank=options.adapters.max_rank,
        compiled=backends.compiled,
        runs_ahead=runs_ahead or backends.compiled is not None,
    )
    worker.warm_up(_progress)
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
        backends.attention.name,
        backends.ops.name,
        num_slots,
        arena_bytes / 1e6,
        num_blocks,
        BLOCK_SIZE,
    )
    return Parts(core, worker, admission, text, base_name)


@dataclass(frozen=True)
class Backends:
    """What computes attention and LoRA."""

    attention: AttentionBackend
    ops: LoraOps
    compiled: CompiledOptions | None = None
    """Given where layers are compiled and decode steps captured."""


def choose_backends(
    model: BaseModel, anatomy: Anatomy, num_blocks: int, options: EngineOptions
) -> Backends:
    """The best for the model's device and dtype."""
    device, layers = model.model.device, anatomy.attention
    if device.type == "cuda":
        return _cuda_backends(model, layers, num_blocks, options)
    if options.adapters.tuning is not None:
        raise ConfigError("a tuning table is for a GPU's kernels: leave --tuning out on a CPU")
    # float32 products start fast enough for one after the other.
    ops = StackedOps() if model.dtype == torch.bfloat16 else ReferenceOps()
    return Backends(TorchAttention(layers, num_blocks, BLOCK_SIZE, model.dtype, device), ops)


def _cuda_backends(
    model: BaseModel,
    layers: Mapping[int, AttentionLayer],
    num_blocks: int,
    options: EngineOptions,
) -> Backends:
    from loramux.ops.triton_lora import TritonOps

    device, max_step_tokens = model.model.device, options.scheduler.max_step_tokens
    ops = TritonOps(
        padded_rows=padded_rows(options.adapters.max_loras, max_step_tokens),
        max_rank=options.adapters.max_rank,
        device=device,
        chooser=tile_chooser(torch.cuda.get_device_name(device), options.adapters.tuning),
    )
    try:
        from loramux.ops.flashinfer_attention import FlashInferAttention
    except ImportError:
        missing = "FlashInfer is not installed (pip install 'loramux[cuda]')"
    else:
        if FlashInferAttention.supports(layers, model.dtype):
            uploads = Uploads(device)
            attention = FlashInferAttention(
                layers,
                num_blocks,
                BLOCK_SIZE,
                dtype=model.dtype,
                device=device,
                uploads=uploads,
                max_num_seqs=options.scheduler.max_num_seqs,
                max_step_tokens=max_step_tokens,
                max_model_len=model.max_model_len,
            )
            compiled = CompiledOptions(ops, uploads, options.scheduler.max_num_seqs)
            return Backends(attention, ops, compiled)
        missing = "FlashInfer has no kernels for this model's heads or dtype (use bfloat16)"
    log.warning("%s: attention runs in torch, without CUDA graphs, several times slower", missing)
    return Backends(TorchAttention(layers, num_blocks, BLOCK_SIZE, model.dtype, device), ops)


def _progress(keys: Sequence[GraphKey]) -> Iterable[GraphKey]:
    return track(keys, "capturing graphs", console=Console(stderr=True), transient=True)


def _load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotServable(path, f"its tokenizer cannot be read: {error}") from error


def _num_blocks(model: BaseModel, anatomy: Anatomy, options: EngineOptions) -> int:
    per_token = sum(
        kv.num_kv_heads * (kv.key_dim + kv.value_dim) * model.dtype.itemsize
        for kv in (layer.kv for layer in anatomy.attention.values())
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
