"""Compiles the decoder layers, so that what stands between matrix products becomes few launches.

All layers of one kind share a compilation, which holds for any number of rows from two on. The
products, attention and LoRA are ops that the compiler does not look into (``ops/opaque.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as shapes
from torch import nn
from transformers import PreTrainedModel

from loramux.model.stack import decoder_layers, join_runs

MIN_ROWS = 2
"""The compiler takes the size 1 for a constant and would compile everything again for it."""

_PRODUCTS = (nn.Linear, nn.Embedding)
_MAX_VARIANTS = 64
"""Compilations of one piece of modelling code: forms of a step, times kinds of layers."""


def compile_layers(
    model: PreTrainedModel,
    runs: Sequence[Sequence[int]],
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile the decoder layers, and the small modules next to them, at their first calls.

    ``runs``: layers that run as one (``model.stack``).
    """
    # float32 is to be exact; the compiler advises otherwise.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # Sizes that happen to be equal at a first call are no constants: what is compiled for a step of
    # 64 rows, where heads have 64 features, would hold for that number alone.
    shapes.use_duck_shape = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VARIANTS)
    options = _inductor_options() if backend == "inductor" else None
    stack = decoder_layers(model)
    assert stack is not None, "the examination has found attention in layers"
    parent, layers = stack
    for layer in join_runs(layers, runs):
        layer.compile(fullgraph=True, dynamic=True, backend=backend, options=options)
    for module in parent.children():
        # Norms and rotary embeddings: many small kernels as they are.
        if module is not layers and not any(isinstance(m, _PRODUCTS) for m in module.modules()):
            module.compile(dynamic=True, backend=backend, options=options)


def _inductor_options() -> dict[str, Any]:
    """Forms of a step are compiled apart, and a base row must have the same bits in all of them,
    whether adapters share its step or not. Routers choose by a kernel for few experts."""
    from loramux.model.top_k_pass import ShortTopK
    from loramux.model.whole_rows import WholeRows

    return {
        "combo_kernels": True,
        # Round wherever the modelling code does, and fuse no product with a sum: else each form
        # leaves out other roundings.
        "emulate_precision_casts": True,
        "inductor_choices_class": WholeRows,
        "post_grad_custom_pre_pass": ShortTopK(),
    }
