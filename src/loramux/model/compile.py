"""Compiles the decoder layers, so that what stands between matrix products becomes few launches.

All layers of one kind share a compilation, which holds for any number of rows from two on. The
products, attention and LoRA are ops that the compiler does not look into (``ops/opaque.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

MIN_ROWS = 2
"""The compiler takes the size 1 for a constant and would compile everything again for it."""

_PRODUCTS = (nn.Linear, nn.Embedding)
_MAX_VARIANTS = 64
"""Compilations of one piece of modelling code: forms of a step, times kinds of layers."""


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every decoder layer, and the small modules next to them, at their first calls."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    options = {"combo_kernels": True} if backend == "inductor" else None
    parent, layers = decoder_layers(model)
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True, backend=backend, options=options)
    for module in parent.children():
        # Norms and rotary embeddings: many small kernels as they are.
        if module is not layers and not any(isinstance(m, _PRODUCTS) for m in module.modules()):
            module.compile(dynamic=True, backend=backend, options=options)


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The list of modules that have attention inside, and the module that it belongs to."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and any(
            hasattr(part, "layer_idx") for part in module.modules()
        ):
            return model.get_submodule(name.rpartition(".")[0]), module
    raise AssertionError("the examination found attention in no list of layers")
