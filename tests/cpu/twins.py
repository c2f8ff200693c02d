"""One tiny model in two forms with the same weights: Phi-3, which is fused, and Llama, split."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedModel

VOCAB = 160
HEADS, KV_HEADS, HEAD_DIM, MLP = 6, 2, 8, 56
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

ROWS = {
    "q_proj": ("qkv_proj", range(HEADS * HEAD_DIM)),
    "k_proj": ("qkv_proj", range(HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM)),
    "v_proj": ("qkv_proj", range((HEADS + KV_HEADS) * HEAD_DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)),
    "gate_proj": ("gate_up_proj", range(MLP)),
    "up_proj": ("gate_up_proj", range(MLP, 2 * MLP)),
}
"""Where the rows of each of Llama's projections stand in Phi-3's."""


def phi3() -> PreTrainedModel:
    """The fused one; the same weights at each call."""
    model = _empty(Phi3Config(**_SIZES))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            gain = 2.5 if "embed" in name or "head" in name else 1.5
            parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5, generator=generator)
    return model


def llama() -> PreTrainedModel:
    """The split one."""
    model, weights = _empty(LlamaConfig(**_SIZES)), phi3().state_dict()
    for name, parameter in model.named_parameters():
        leaf = name.split(".")[-2]
        fused, rows = ROWS.get(leaf, (leaf, None))
        found = weights[name.replace(leaf, fused)]
        parameter.copy_(found if rows is None else found[rows.start : rows.stop])
    return model


def write_adapter(model: PreTrainedModel, directory: Path, **config: Any) -> nn.Module:
    """Make a strong random adapter for a copy of ``model`` and give PEFT's model back."""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.normal_(0.0, 0.6 * parameter.shape[-1] ** -0.5, generator=generator)
    adapted.save_pretrained(str(directory))
    return adapted.eval()


def logprobs(model: nn.Module, tokens: list[int]) -> Tensor:
    """``[T, vocab]``"""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


def _empty(config: Any) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval().requires_grad_(False)
