"""Compiles the decoder layers, so that what stands between matrix products becomes few launches.

All layers of one kind share a compilation, which holds for any number of rows from two on. The
products, attention and LoRA are ops that the compiler does not look into (``ops/opaque.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

MIN_ROWS = 2
"""The compiler takes the size 1 for a constant and would compile everything again for it."""

_MAX_VARIANTS = 64
"""Compilations of one piece of modelling code: forms of a step, times kinds of layers."""


def compile_layers(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile every decoder layer at its first call; the number of them."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    layers = list(decoder_layers(model))
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=True, backend=backend)
    return len(layers)


def decoder_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The outermost modules of lists that have attention inside."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        members = [m for m in module if any(hasattr(part, "layer_idx") for part in m.modules())]
        if members:
            found.append(name)
            yield from members
