"""Every field of PEFT's LoraConfig (0.21.2): honoured, without effect, or refused when live.

And those that say what a weight file cannot: ``swap_gate_up``, loramux's own, and ``lora_B_layout``
with ``unsloth_fused_expert_lora``, which Unsloth writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from loramux.adapters.spec import Stacking

HONOURED = frozenset(
    {
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "target_modules",
        "init_lora_weights",
        "bias",
        "lora_bias",
        "modules_to_save",
        "trainable_token_indices",
        "ensure_weight_tying",
        "target_parameters",
        "swap_gate_up",
        "lora_B_layout",
        "unsloth_fused_expert_lora",
    }
)
"""Fields that decide what is served or refused; ``peft_config`` reads each of them."""

EXPERT_COLUMNS: Mapping[str | None, Stacking] = {
    None: Stacking.COLUMNS,
    "rank_major": Stacking.COLUMNS,
    "grouped_by_expert": Stacking.COLUMN_BLOCKS,
}
"""Values of ``lora_B_layout``: how B of all experts in one is stored. PEFT's way is the first."""

INERT: Mapping[str, str] = {
    "auto_mapping": "informative",
    "peft_version": "informative",
    "revision": "informative",
    "inference_mode": "training",
    "lora_dropout": "training",
    "megatron_config": "training",
    "megatron_core": "training",
    "eva_config": "initialisation",
    "corda_config": "initialisation",
    "loftq_config": "initialisation",
    "lora_ga_config": "initialisation",
    "exclude_modules": "weights-decide",
    "layers_to_transform": "weights-decide",
    "layers_pattern": "weights-decide",
    "fan_in_fan_out": "base-decides",
    "qalora_group_size": "use_qalora-decides",
    "runtime_config": "training",
    "merge_weights": "training",
}
"""Fields that change no answer whatever their value, and why.

``weights-decide``: the modules are those that have tensors in the weight file.
``initialisation``: used only as ``init_lora_weights`` says, which is read.
"""

REFUSED_WHEN_LIVE: Mapping[str, str] = {
    "layer_replication": "it changes the base model: layers are repeated",
    "alora_invocation_tokens": "activated LoRA (aLoRA) acts on a part of the prompt only",
    "use_qalora": "QALoRA pools the input of A",
    "use_bdlora": "BD-LoRA stores block-diagonal matrices",
    "kasa_config": "KaSA changes the base weights and adds a diagonal between A and B",
    "monteclora_config": "MonteCLoRA samples its weights",
    "velora_config": "VeLoRA stores tensors that are not read here",
    "arrow_config": "Arrow routes between several adapters",
    "enable_lora": "LoRA on a part of a fused projection",
}
"""Fields that change the arithmetic in a way that is not served, and what they do."""

KNOWN = HONOURED | INERT.keys() | REFUSED_WHEN_LIVE.keys()

INERT_INITS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
"""Values of ``init_lora_weights`` that leave the base as it is (so do true, false and null)."""

BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values for which training changed the base: the file is relative to that base."""

HEADLESS_TASKS: Mapping[str, str] = {
    "SEQ_CLS": "sequence classification",
    "TOKEN_CLS": "token classification",
    "QUESTION_ANS": "extractive question answering",
    "FEATURE_EXTRACTION": "feature extraction",
}
"""Tasks that do not generate text, so that a language model's answers mean nothing for them."""


def is_live(value: object) -> bool:
    """Whether a field is set: anything but null, false and empty containers or strings."""
    if value is None or value is False:
        return False
    return not (isinstance(value, dict | list | str) and not value)


def is_rank(value: object) -> bool:
    """Whether a value of JSON is a positive integer that a rank can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def is_number(value: object) -> bool:
    """Whether a value of JSON is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def is_token_list(value: object) -> bool:
    """Whether a value of JSON is a list of different tokens."""
    if not isinstance(value, list):
        return False
    tokens = all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 2**31 for t in value)
    return tokens and len(set(value)) == len(value)
