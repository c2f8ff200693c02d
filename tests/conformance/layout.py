"""The layout of a tiny base model, as transformers loads it."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

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
    return BaseLayout(f"tiny/{directory.name}", modules, others)


def _shape(module: nn.Module) -> ModuleShape | None:
    if isinstance(module, nn.Linear):
        return ModuleShape(module.in_features, module.out_features)
    if isinstance(module, Conv1D):  # its weight is [in, out]
        return ModuleShape(*module.weight.shape)
    return None
