"""The layout of a tiny base model, as transformers loads it."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from loramux.adapters.fusions import find_fusions
from loramux.adapters.spec import BaseLayout, ModuleShape


@functools.cache
def base_layout(directory: Path) -> BaseLayout:
    """Linears of the model in ``directory``, without its head; all else is ``other_modules``."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    modules = {
        name: shape
        for name, module in model.named_modules()
        if name != "lm_head" and (shape := _shape(module)) is not None
    }
    others = frozenset(name for name, _ in model.named_modules() if name) - modules.keys()
    config = model.config
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    rows = tuple(heads * head_dim for heads in (config.num_attention_heads, kv_heads, kv_heads))
    fusions = find_fusions(
        config.model_type, modules, dict.fromkeys(range(config.num_hidden_layers), rows)
    )
    return BaseLayout(f"tiny/{directory.name}", modules, others, config.model_type, fusions)


def _shape(module: nn.Module) -> ModuleShape | None:
    if isinstance(module, nn.Linear):
        return ModuleShape(module.in_features, module.out_features)
    if isinstance(module, Conv1D):  # its weight is [in, out]
        return ModuleShape(*module.weight.shape)
    return None
