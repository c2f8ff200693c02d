"""Names of tensors in a PEFT weight file: what each tensor is and which module it belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal["lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector"]
Origin = Literal["own", "copy", "base layer", "original", "tokens"]

_WRAPPER = "base_model.model."

_PATH = r"([^.]+(?:\.[^.]*)*?)"
"""Tried word by word, which takes a third of the time of going letter by letter."""
_NAME = r"(?:\.([^.]+))?"
"""Of the adapter, where the file has it inside the key (``lora_A.default.weight``)."""
_DELTA = re.compile(rf"{_PATH}\.(lora_A|lora_B|lora_magnitude_vector){_NAME}\.(weight|bias)")
_BARE_DELTA = re.compile(
    rf"{_PATH}\.(lora_magnitude_vector|lora_embedding_A|lora_embedding_B){_NAME}"
)
_PARTS: dict[tuple[str, str | None], tuple[Part, bool]] = {
    ("lora_A", "weight"): ("lora_A", False),
    ("lora_B", "weight"): ("lora_B", False),
    ("lora_B", "bias"): ("lora_B.bias", False),
    ("lora_magnitude_vector", "weight"): ("lora_magnitude_vector", False),
    ("lora_magnitude_vector", None): ("lora_magnitude_vector", False),
    ("lora_embedding_A", None): ("lora_A", True),
    ("lora_embedding_B", None): ("lora_B", True),
}
"""By the word in the key and what ends it: the part, and whether only embeddings have it so."""

_TOKENS = re.compile(rf"{_PATH}\.token_adapter\.trainable_tokens_delta{_NAME}")
_PARAMETER = re.compile(
    rf"{_PATH}(?:\.(?:token_adapter\.)?(base_layer)|\.(original_module)"
    r"|\.(modules_to_save)(?:\.[^.]+)?)?\.(weight|bias)"
)
_ORIGINS: dict[str | None, Origin] = {
    None: "own",
    "modules_to_save": "copy",
    "base_layer": "base layer",
    "original_module": "original",
}

_OTHER_KINDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\.lora_[ab]$", "tensors are named as mlx-lm does: convert the adapter to PEFT's format"),
        (
            r"(^|[._])scale(_inv)?$",
            "scales of quantised weights are not read: store the weights without, as BF16 or F16",
        ),
        (r"\.lora_E\b|\.ranknum\b", "AdaLoRA is not served"),
        (r"lora_", "tensors of an unknown kind"),
        (
            r"(^|\.)(score|classifier|pre_classifier|qa_outputs|v_head)\.",
            "a classification or value head (score) is not served",
        ),
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
    of_embedding: bool = False
    """Spelled as PEFT does for embeddings alone."""


@dataclass(frozen=True, slots=True)
class ParameterKey:
    """A tensor with values for a parameter of the base."""

    path: str
    parameter: str
    """``weight`` or ``bias``"""
    origin: Origin
    """``own``: trained in place of the base's. ``copy``: the same, by the name that PEFT gives it
    in memory. ``base layer``: the base's, as it was when LoRA or single tokens were put on the
    module. ``original``: the base's, which ``own`` stands in for. ``tokens``: those rows that the
    configuration names."""


def parse_key(key: str) -> DeltaKey | ParameterKey | None:
    """What ``key`` says, or None where ``describe_other`` does."""
    delta = _DELTA.fullmatch(key) or _BARE_DELTA.fullmatch(key)
    if delta is not None:
        path, word, adapter, *end = delta.groups()
        found = _PARTS.get((word, end[0] if end else None))
        return found and DeltaKey(path.removeprefix(_WRAPPER), found[0], adapter, found[1])
    if any(pattern.search(key) for pattern, _ in _OTHER_KINDS):
        return None
    if (tokens := _TOKENS.fullmatch(key)) is not None:
        return ParameterKey(tokens[1].removeprefix(_WRAPPER), "weight", "tokens")
    if (parameter := _PARAMETER.fullmatch(key)) is not None:
        path, *wrappers, leaf = parameter.groups()
        origin = _ORIGINS[next(filter(None, wrappers), None)]
        return ParameterKey(path.removeprefix(_WRAPPER), leaf, origin)
    return None


def describe_other(key: str) -> str:
    """Why a tensor that ``parse_key`` does not know is refused, in words for an operator."""
    for pattern, words in _OTHER_KINDS:
        if pattern.search(key):
            return words
    return "tensors of an unknown kind"
