"""Replaces the linears of a loaded model by LoRA-capable ones."""

from __future__ import annotations

from torch import Tensor, nn

from loramux.lora.layers import LoraContext, LoraLinear
from loramux.lora.weights import ModuleTable
from loramux.ops.interface import Site, Slice


def insert_sites(model: nn.Module, modules: ModuleTable, context: LoraContext) -> list[nn.Module]:
    """Wrap every module of the table in place; returns the wrapped linears, in table order.

    Each module becomes a site of one slice. A fused linear is a site whose slices name the modules
    that went into it; everything below the sites works by slices already.
    """
    originals: list[nn.Module] = []
    for index, (name, shape) in enumerate(zip(modules.names, modules.shapes, strict=True)):
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        base = getattr(parent, leaf)
        bias: Tensor | None = getattr(base, "bias", None)
        site = Site((Slice(index, 0, shape.out_features),), shape.in_features, bias)
        setattr(parent, leaf, LoraLinear(base, site, context))
        originals.append(base)
    return originals
