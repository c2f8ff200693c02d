"""The base model from disk, checked for what would make it answer wrongly."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from loramux.config import ModelOptions
from loramux.errors import ConfigError, ModelNotServable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FALLBACK_CONTEXT = 2048


@dataclass(frozen=True)
class BaseModel:
    """A loaded base and the facts about it that serving needs."""

    name: str
    model: PreTrainedModel
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    @property
    def hidden_size(self) -> int:
        """Numbers that the head takes for each token."""
        head: Any = self.model.get_output_embeddings()
        return head.weight.shape[1]


def load_base(path: str, options: ModelOptions) -> BaseModel:
    """Load a model directory. Raises ConfigError or ModelNotServable, with the reason."""
    device = resolve_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    path, config = read_config(path)
    max_model_len = _context_length(config, options.max_model_len)
    _refuse_wrong_for_mixed_batches(path, config, max_model_len)
    transformers.utils.logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=resolve_dtype(config, options.dtype), attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotServable(path, f"it does not load as a causal model: {error}") from error
    assert isinstance(model, PreTrainedModel)
    nn.Module.to(model, device)
    return adopt(path, model, max_model_len)


def read_config(path: str) -> tuple[str, PreTrainedConfig]:
    """A model directory, ``~`` expanded, and its config. Raises ConfigError or ModelNotServable."""
    if not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"the base model {path!r} is no directory: name a folder with config.json"
        )
    path = str(Path(path).expanduser())
    try:
        return path, AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotServable(path, f"its config.json cannot be read: {error}") from error


def adopt(name: str, model: PreTrainedModel, max_model_len: int | None = None) -> BaseModel:
    """Take over a model that is in memory (tests, benchmarks). Raises ModelNotServable."""
    model = model.eval().requires_grad_(False)
    config = model.config
    max_model_len = _context_length(config, max_model_len)
    _refuse_wrong_for_mixed_batches(name, config, max_model_len)
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelNotServable(
            name,
            f"{type(model).__name__} computes attention in code of its own; only architectures "
            "that use transformers' attention interface can be served",
        )
    head = model.get_output_embeddings()
    if head is None or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelNotServable(name, f"{type(model).__name__} is no causal language model")
    return BaseModel(
        name=name,
        model=model,
        dtype=model.dtype,
        vocab_size=head.weight.shape[0],
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(config, model.generation_config),
    )


def resolve_device(name: str) -> torch.device:
    """Raises ConfigError for cuda on a machine without a GPU."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ConfigError("device 'cuda' needs an NVIDIA GPU and torch's CUDA build: use cpu")
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def resolve_dtype(config: PreTrainedConfig, name: str) -> torch.dtype:
    """The dtype in which a base is served; ``name`` is an option's value."""
    if name != "auto":
        return _DTYPES[name]
    # float16 has too small a range for activations and is widened.
    return torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float32


def _context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if wanted is None:
        return int(own or _FALLBACK_CONTEXT)
    if own is not None and wanted > own:
        raise ConfigError(f"max_model_len {wanted} is above the model's own limit of {own} tokens")
    return wanted


def _refuse_wrong_for_mixed_batches(
    name: str, config: PreTrainedConfig, max_model_len: int
) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotServable(
            name, "it is an encoder-decoder; only decoder-only models are served"
        )
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        # Both compute other angles for the whole batch once its longest sequence passes a length,
        # so one request would change the answer of another.
        limit = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = int(limit or config.max_position_embeddings)
        if max_model_len > limit:
            raise ModelNotServable(
                name,
                f"its rotary embedding ({kind}) depends on the longest sequence of the batch "
                f"beyond {limit} tokens: start with --max-model-len {limit} or less",
            )


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary settings, which newer configurations may hold once for each kind of layer."""
    for field in ("rope_parameters", "rope_scaling"):
        value = getattr(config, field, None)
        if isinstance(value, dict):
            yield value
            yield from (inner for inner in value.values() if isinstance(inner, dict))


def _eos_token_ids(config: PreTrainedConfig, generation: GenerationConfig | None) -> frozenset[int]:
    for holder in (generation, config):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
