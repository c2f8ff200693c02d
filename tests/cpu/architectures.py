"""Tiny random models of many architectures, and adapters that PEFT makes for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB = 160


@dataclass(frozen=True)
class Architecture:
    """A transformers configuration class, what differs from the common tiny sizes, and targets."""

    config: str
    change: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    fan_in_fan_out: bool = False


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # A random head that is not the embedding: else most models only repeat their last token.
    "tie_word_embeddings": False,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig"),
    "llama_bias": Architecture("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Architecture("MistralConfig", {"sliding_window": 8, "head_dim": 8}),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config", {"head_dim": 16}),
    "gemma": Architecture("GemmaConfig", {"head_dim": 8}),
    "gemma2": Architecture("Gemma2Config", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS}),
    "gemma3_text": Architecture(
        "Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWS}
    ),
    "phi": Architecture("PhiConfig", targets=("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")),
    "phi3": Architecture("Phi3Config", targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "gpt2": Architecture("GPT2Config", _GPT2, ("c_attn", "c_proj", "c_fc"), fan_in_fan_out=True),
    "gpt_neox": Architecture(
        "GPTNeoXConfig",
        targets=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "gpt_bigcode": Architecture("GPTBigCodeConfig", _GPT2, ("c_attn", "c_proj", "c_fc")),
    "gptj": Architecture(
        "GPTJConfig", {**_GPT2, "rotary_dim": 4}, ("q_proj", "v_proj", "out_proj", "fc_in")
    ),
    "codegen": Architecture(
        "CodeGenConfig", {**_GPT2, "rotary_dim": 4}, ("qkv_proj", "out_proj", "fc_out")
    ),
    "olmo": Architecture("OlmoConfig"),
    "olmo2": Architecture("Olmo2Config"),
    "olmo3": Architecture("Olmo3Config", _WINDOWS),
    "granite": Architecture(
        "GraniteConfig",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    ),
    "starcoder2": Architecture(
        "Starcoder2Config", {"sliding_window": 8}, ("q_proj", "k_proj", "o_proj", "c_fc", "c_proj")
    ),
    "smollm3": Architecture("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "glm": Architecture(
        "GlmConfig", {"head_dim": 8}, ("q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    ),
    "glm4": Architecture(
        "Glm4Config", {"head_dim": 8}, ("q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")
    ),
    "cohere": Architecture("CohereConfig", {"logit_scale": 0.5}),
    "cohere2": Architecture("Cohere2Config", {"logit_scale": 0.5, **_WINDOWS}),
    "nemotron": Architecture("NemotronConfig"),
    "ernie4_5": Architecture("Ernie4_5Config"),
    "exaone4": Architecture("Exaone4Config", _WINDOWS),
    "seed_oss": Architecture("SeedOssConfig", {"head_dim": 8}),
    "arcee": Architecture("ArceeConfig"),
    "helium": Architecture("HeliumConfig", {"head_dim": 8}),
    "apertus": Architecture("ApertusConfig"),
    "hunyuan_v1_dense": Architecture("HunYuanDenseV1Config", {"head_dim": 8}),
    "persimmon": Architecture("PersimmonConfig", targets=("query_key_value", "dense")),
    "opt": Architecture(
        "OPTConfig",
        {"ffn_dim": 56, "word_embed_proj_dim": 32},
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    ),
    "mixtral": Architecture(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "gpt_oss": Architecture(
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **_WINDOWS},
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    "olmoe": Architecture(
        "OlmoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2},
        ("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
}


def build(name: str, **change: Any) -> PreTrainedModel:
    """A random model whose greedy tokens change from place to place and hang on the context."""
    architecture = ARCHITECTURES[name]
    config = getattr(transformers, architecture.config)(
        **{**_COMMON, **architecture.change, **change}
    )
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_tokens" in key and name.startswith("gemma"):
                parameter.normal_(0.0, 0.2)  # multiplied by the root of the hidden size
            elif parameter.dim() >= 2:
                gain = 2.5 if "embed" in key or "wte" in key or "head" in key else 1.5
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)
            elif key.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model


def write_adapter(name: str, model: PreTrainedModel, directory: Path) -> PeftModel:
    """Make a strong random adapter, write it as PEFT does, and give the PEFT model back."""
    architecture = ARCHITECTURES[name]
    config = LoraConfig(
        r=6,
        lora_alpha=9,
        target_modules=list(architecture.targets),
        fan_in_fan_out=architecture.fan_in_fan_out,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    torch.manual_seed(7)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.normal_(0.0, 0.5 * parameter.shape[-1] ** -0.5)
    adapted.save_pretrained(str(directory))
    return adapted.eval()
