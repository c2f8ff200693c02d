"""Random models and adapters, small enough to be made in a test."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loramux.adapters.spec import BaseLayout

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def tiny_model(
    *,
    vocab_size: int = 160,
    hidden_size: int = 32,
    intermediate_size: int = 56,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 128,
    bias: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> PreTrainedModel:
    """A random Llama in memory; the same arguments give the same weights.

    Weights are strong enough for greedy tokens to change from place to place and to hang on the
    whole context, and the head is not the embedding: otherwise it would repeat its last token.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_positions,
        attention_bias=bias,
        mlp_bias=bias,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            gain = 2.5 if "embed" in name or "head" in name else 1.5
            parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)
    return model.to(getattr(torch, dtype))


def random_adapter(
    directory: Path,
    base: BaseLayout,
    *,
    rank: int,
    targets: Collection[str],
    seed: int,
    dora: bool = False,
    dtype: str = "float32",
    alpha: float | None = None,
    rank_pattern: Mapping[str, int] | None = None,
) -> Path:
    """Write a PEFT folder with random weights on every module whose name ends in a target.

    ``alpha`` is twice the rank unless given; ``rank_pattern`` gives some targets another rank.
    Weights change a model's output by about as much as its own, so that a mistake shows.
    Returns ``directory``, which is made when it does not exist.
    """
    import torch
    from safetensors.torch import save_file

    ranks = dict.fromkeys(targets, rank) | dict(rank_pattern or {})
    tensors = _random_weights(base, ranks, dora=dora, generator=torch.Generator().manual_seed(seed))
    stored = {key: tensor.to(getattr(torch, dtype)) for key, tensor in tensors.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "rank_pattern": dict(rank_pattern or {}),
        "use_dora": dora,
        "bias": "none",
        "target_modules": sorted(targets),
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return directory


def _random_weights(
    base: BaseLayout, ranks: Mapping[str, int], *, dora: bool, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """A, B and magnitudes by PEFT's keys; ``ranks`` maps the ends of module names to ranks."""
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    tensors: dict[str, torch.Tensor] = {}
    for module, shape in base.modules.items():
        target = next((t for t in ranks if module == t or module.endswith(f".{t}")), None)
        if target is None:
            continue
        key = f"base_model.model.{module}."
        tensors[f"{key}lora_A.weight"] = normal(ranks[target], shape.in_features)
        tensors[f"{key}lora_B.weight"] = normal(shape.out_features, ranks[target])
        if dora:
            magnitude = 0.5 + torch.rand(shape.out_features, generator=generator)
            tensors[f"{key}lora_magnitude_vector"] = magnitude
    assert tensors, f"no module of {base.name} ends in any of {sorted(ranks)}"
    return tensors
