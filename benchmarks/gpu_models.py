"""Shapes of large models with random weights and adapters, whose values do not matter for speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from loramux.adapters.experts import inside
from loramux.adapters.spec import ModuleShape, PreparedAdapter
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SchedulerOptions
from loramux.engine.adapters import IncomingAdapter
from loramux.engine.build import Parts, assemble
from loramux.lora.host_memory import HostBlock
from loramux.lora.weights import HostCopy, block_bytes, plain_placements
from loramux.model.load import adopt
from loramux.types import AdapterId
from loramux.worker.worker import Worker

_HIDDEN, _INTERMEDIATE, _KEYS = 4096, 14336, 1024
_LAYER = (
    *(ModuleShape(_HIDDEN, out) for out in (_HIDDEN, _KEYS, _KEYS, _HIDDEN)),  # q, k, v, o
    *(ModuleShape(_HIDDEN, _INTERMEDIATE), ModuleShape(_HIDDEN, _INTERMEDIATE)),  # gate, up
    ModuleShape(_INTERMEDIATE, _HIDDEN),
)


def adapter_bytes(rank: int, layers: int = 32) -> int:
    """Of an adapter on every linear of the layers."""
    return layers * block_bytes(_LAYER, rank, torch.bfloat16)


def llama_engine(*, layers: int = 32, **sizes: Any) -> Parts:
    """An engine on the GPU over Llama-3.1-8B's shape; ``sizes`` as ``engine_over`` has them."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return engine_over(config, "llama-8b-shape", **sizes)


def qwen_moe_engine(*, layers: int = 48, **sizes: Any) -> Parts:
    """The same over Qwen3-30B-A3B's shape."""
    config = Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return engine_over(config, "qwen3-30b-a3b-shape", **sizes)


def engine_over(
    config: PreTrainedConfig,
    name: str,
    *,
    max_loras: int = 32,
    max_num_seqs: int = 128,
    max_step_tokens: int = 8192,
    kv_cache: str = "40GiB",
    device_cache: str | None = None,
    host_cache: str = "16GiB",
    self_check: bool = True,
) -> Parts:
    """An engine on the GPU over random weights."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    options = EngineOptions(
        model=ModelOptions(device="cuda", self_check=self_check),
        # No adapter has a source from which it could be read again.
        adapters=AdapterOptions(
            max_loras=max_loras, device_cache=device_cache, host_cache=host_cache
        ),
        # Prompts come again from run to run, and every run is to compute them.
        scheduler=SchedulerOptions(
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            kv_cache=kv_cache,
            prefix_cache=False,
        ),
    )
    return assemble(adopt(name, model), word_tokenizer(config.vocab_size), options, "base")


def add_adapters(parts: Parts, names: Sequence[str], ranks: Sequence[int]) -> None:
    """Register random adapters on every linear and expert, whose ranks are taken in turns.

    Afterwards every step with them has its graph, as in an engine that had a moment's rest.
    """
    for seed, name in enumerate(names):
        rank = ranks[seed % len(ranks)]
        prepared = random_prepared(parts.worker, f"{name}-r{rank}", rank, seed)
        parts.core.register(name, "random", IncomingAdapter(prepared))
    while parts.core.use_spare_time():
        pass


def random_prepared(worker: Worker, adapter_id: str, rank: int, seed: int) -> PreparedAdapter:
    """A host copy as ``lora.weights.pack`` would lay it out, without files."""
    shapes = adaptable_shapes(worker)
    num_bytes = block_bytes([*shapes.values()], rank, worker.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    block = torch.randn(num_bytes // worker.dtype.itemsize, generator=generator, device=device)
    block = (block * 0.02).to(worker.dtype).cpu()
    copy = HostCopy(
        worker.host_memory.keep(HostBlock((block,))),
        plain_placements(shapes, rank, worker.dtype),
    )
    return PreparedAdapter(AdapterId(adapter_id), copy.num_bytes, rank, (), copy)


def adaptable_shapes(worker: Worker) -> dict[int, ModuleShape]:
    """Linears of the layers and projections of experts, by their rows in the tables."""
    modules, num_linears = worker.modules, len(worker.layer_shapes)
    return {
        row: shape
        for row, (name, shape) in enumerate(zip(modules.names, modules.shapes, strict=True))
        if row < num_linears or inside(name) is not None
    }


def word_tokenizer(vocab_size: int = 128256) -> PreTrainedTokenizerFast:
    """Each token is its own number, as text."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
