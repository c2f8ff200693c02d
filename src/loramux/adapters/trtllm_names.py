"""TensorRT-LLM's names for linears, and which linears of transformers they mean.

Three pairs are crossed: ``mlp_gate``, ``moe_gate`` and ``shared_expert_gate`` are the up
projections, and what goes through the activation, transformers' gate projection, is
``mlp_h_to_4h``, ``moe_h_to_4h`` and ``shared_expert_h_to_4h``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from loramux.adapters.experts import DOWN, GATE, OLD_NAMES, UP

_CROSS = r"(?:cross_attn|cross_attention|crossattention|encoder_attn|EncDecAttention)\."
_SELF = r"(?:self_attn|self_attention|attn|attention)\."
_EXPERT = r"experts\.(?:\d+\.)?"
_SHARED = r"shared_experts?\."
_MAMBA = r"(?:mamba|mixer)\."
_MLP = r"(?:mlp|feed_forward)\."

_PATTERNS: Mapping[str, str] = {
    "cross_attn_qkv": rf"{_CROSS}(?:qkv_proj|qkv)",
    "cross_attn_q": rf"{_CROSS}(?:q_proj|q)",
    "cross_attn_k": rf"{_CROSS}(?:k_proj|k)",
    "cross_attn_v": rf"{_CROSS}(?:v_proj|v)",
    "cross_attn_dense": rf"{_CROSS}(?:o_proj|out_proj|dense|o)",
    "moe_h_to_4h": rf"{_EXPERT}(?:{OLD_NAMES[GATE]}|{GATE})",
    "moe_4h_to_h": rf"{_EXPERT}(?:{OLD_NAMES[DOWN]}|{DOWN})",
    "moe_gate": rf"{_EXPERT}(?:{OLD_NAMES[UP]}|{UP})",
    "moe_router": r"(?:block_sparse_moe|mlp|moe|feed_forward)\.(?:gate|router)",
    "mlp_router": r"shared_expert_gate",
    "shared_expert_h_to_4h": rf"{_SHARED}gate_proj",
    "shared_expert_4h_to_h": rf"{_SHARED}down_proj",
    "shared_expert_gate": rf"{_SHARED}up_proj",
    "mamba_in_proj": rf"{_MAMBA}in_proj",
    "mamba_out_proj": rf"{_MAMBA}out_proj",
    "moe_latent_fc1": r"fc1_latent_proj",
    "moe_latent_fc2": r"fc2_latent_proj",
    "attn_qkv": r"qkv_proj|query_key_value|Wqkv|W_pack|wqkv|c_attn",
    "attn_q": r"q_proj",
    "attn_k": r"k_proj",
    "attn_v": r"v_proj",
    "attn_dense": rf"o_proj|{_SELF}(?:out_proj|dense|c_proj)",
    "mlp_h_to_4h": rf"gate_proj|dense_h_to_4h|{_MLP}(?:c_fc|fc1|fc_in)",
    "mlp_4h_to_h": rf"down_proj|dense_4h_to_h|{_MLP}(?:c_proj|fc2|fc_out)",
    "mlp_gate": r"up_proj",
    "mlp_gate_up": r"gate_up_proj",
}
"""Ends of module names; the first that fits counts, so those with a parent of their own come
first."""

_COMPILED = {name: re.compile(rf"(?:^|\.)(?:{text})$") for name, text in _PATTERNS.items()}

_IN_EXPERTS = re.compile(rf"(?:^|\.){_EXPERT}")

NAMES = tuple(_PATTERNS)


def trtllm_name(module: str) -> str | None:
    """What TensorRT-LLM calls a linear, by its name in transformers; None where it has no name."""
    found = next((name for name, end in _COMPILED.items() if end.search(module)), None)
    if found is not None and _IN_EXPERTS.search(module) and not found.startswith("moe_"):
        return None  # all experts in one tensor
    return found
