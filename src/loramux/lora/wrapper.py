"""Stands for a module of the base while it computes something more."""

from __future__ import annotations

from typing import Any

from torch import nn

from loramux.lora.layers import LoraContext


class Wrapper(nn.Module):
    """Has the attributes of the base's module, which the model may ask for."""

    def __init__(self, base: nn.Module, context: LoraContext) -> None:
        super().__init__()
        self.base = base
        self.context = context

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)
