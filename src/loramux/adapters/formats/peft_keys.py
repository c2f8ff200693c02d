"""Names of tensors in a PEFT weight file: what each tensor is and which module it belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

Part = Literal["lora_A", "lora_B", "lora_magnitude_vector"]

_WRAPPER = "base_model.model."

_DELTA = re.compile(r"(.+?)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.([^.]+))?\.weight")
_MAGNITUDE = re.compile(r"(.+?)\.(lora_magnitude_vector)(?:\.([^.]+))?")

_OTHER_KINDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\.lora_embedding_[AB]\b", "LoRA on an embedding (embed_tokens) is not served"),
        (r"^(?=.*\.bias$).*\.lora_B\b", "lora_bias: a bias of lora_B is not served"),
        (r"\.lora_[ab]$", "tensors are named as mlx-lm does: convert the adapter to PEFT's format"),
        (
            r"\.token_adapter\.|trainable_tokens_",
            "trainable_token_indices: replaced token embeddings are not served",
        ),
        (r"\.lora_E\b|\.ranknum\b", "AdaLoRA is not served"),
        (r"lora_", "tensors of an unknown kind"),
        (
            r"(^|\.)(score|classifier|pre_classifier|qa_outputs|v_head)\.",
            "a classification or value head (score) is not served",
        ),
        (
            r"(^|\.)(embed_tokens|wte|lm_head|embed_out)\.",
            "an embedding or lm_head of the adapter's own (modules_to_save, added tokens) "
            "is not served",
        ),
        (r"\.bias$", "replaced biases of the base (bias=all or lora_only) are not served"),
        (r"\.weight$", "whole replaced modules (modules_to_save) are not served"),
    )
)


@dataclass(frozen=True, slots=True)
class DeltaKey:
    """A tensor of LoRA or DoRA: a part of the delta on one module."""

    path: str
    """The module as the adapter calls it, without PEFT's own wrapper."""
    part: Part
    adapter: str | None
    """Name of the adapter where the file has it inside the key (``lora_A.default.weight``)."""


def parse_key(key: str) -> DeltaKey | None:
    """What ``key`` says, or None for any tensor that is not a part of a delta on a linear."""
    match = _DELTA.fullmatch(key) or _MAGNITUDE.fullmatch(key)
    if match is None:
        return None
    path, part, adapter = match.groups()
    return DeltaKey(path.removeprefix(_WRAPPER), cast(Part, part), adapter)


def describe_other(key: str) -> str:
    """Why a tensor that ``parse_key`` does not know is refused, in words for an operator."""
    for pattern, words in _OTHER_KINDS:
        if pattern.search(key):
            return words
    return "tensors of an unknown kind"
