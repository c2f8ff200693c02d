"""The linear that takes LoRA: the base line, then the delta line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.ops.interface import LoraOps, Site


@dataclass(frozen=True)
class LoraContext:
    """What all sites of a model share: the op and the fixed buffers that it reads."""

    ops: LoraOps
    arena: Tensor
    tables: SlotTables
    routing: Routing


class LoraLinear(nn.Module):
    """Wraps whatever linear is there (plain, transposed, quantised)."""

    def __init__(self, base: nn.Module, site: Site, context: LoraContext) -> None:
        super().__init__()
        self.base = base
        self.site = site
        self.context = context

    @property
    def weight(self) -> Tensor:
        """The base's; some modelling code asks for its dtype."""
        return cast(Tensor, self.base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[1, T, in]`` -> ``[1, T, out]``."""
        y = self.base(x)
        ctx = self.context
        if ctx.routing.segments:
            y_rows, x_rows = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
            assert x_rows.shape[0] == ctx.routing.num_tokens, "a site must see every row of a step"
            ctx.ops.lora_add_(y_rows, x_rows, self.site, ctx.arena, ctx.tables, ctx.routing)
        return y
