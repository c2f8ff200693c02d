"""Engines over models in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from loramux.adapters.registry import Registry
from loramux.adapters.sources import AdapterSources
from loramux.config import AdapterOptions, EngineOptions, SchedulerOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.build import Parts, assemble
from loramux.model.load import adopt


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """``"7 12 3"`` <-> ``[7, 12, 3]``: text that shows its tokens."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def assemble_tiny(
    model: PreTrainedModel,
    *,
    max_loras: int = 4,
    max_num_seqs: int = 16,
    max_step_tokens: int = 16,
    kv_blocks: int | None = None,
    device_cache: str | None = None,
    host_cache: str | None = None,
    lora_target_modules: str | None = None,
    adapters: Mapping[str, str] | None = None,
    registry: Registry | None = None,
    runs_ahead: bool = False,
    prefix_cache: bool = True,
    adapter_weights: str | None = None,
    base_alias: str | None = None,
) -> Parts:
    """An engine whose steps are so small that prompts of a few tokens are read in chunks."""
    options = EngineOptions(
        adapters=AdapterOptions(
            max_loras=max_loras,
            device_cache=device_cache,
            host_cache=host_cache,
            lora_target_modules=lora_target_modules,
        ),
        scheduler=SchedulerOptions(
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            kv_cache=None if kv_blocks is None else str(kv_blocks * _block_bytes(model)),
            prefix_cache=prefix_cache,
            adapter_weights=adapter_weights,
        ),
    )
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return assemble(
        adopt("tiny", model),
        word_tokenizer(vocab_size),
        options,
        "tiny",
        adapters=adapters,
        registry=registry,
        base_alias=base_alias,
        runs_ahead=runs_ahead,
    )


def async_engine(
    parts: Parts,
    *,
    max_open: int = 10,
    sources: AdapterSources | None = None,
    registry: Registry | None = None,
) -> AsyncEngine:
    """The parts as a server has them."""
    parts = replace(parts, sources=sources or AdapterSources())
    return AsyncEngine(parts.service(max_open=max_open, registry=registry))


def _block_bytes(model: PreTrainedModel) -> int:
    """Bytes of one KV block of a model whose layers are alike (Llama)."""
    config = model.config
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return 16 * per_token * model.dtype.itemsize
