"""The linears that take LoRA: the base line, then the delta line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import torch
from torch import Tensor, nn

from loramux.lora.own import OwnParts
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.ops.interface import LoraOps, Site
from loramux.ops.opaque import linear, lora_beside, lora_in_place, own_rows


class Form(Enum):
    """How a step computes LoRA; where layers are compiled, each form is compiled apart."""

    NONE = "none"
    """Only the base takes part."""
    BESIDE = "beside"
    """The delta is computed next to the base's product and added by whoever reads the sum."""
    IN_PLACE = "in place"
    """After the base's product, which DoRA's gain multiplies."""
    OWN = "own"
    """In place, and with the parts of their own that some adapters have (``lora.own``)."""


@dataclass
class StepForm:
    """The form of the current step."""

    value: Form = Form.NONE
    own: bool = False
    """Whether it is ``OWN``: compiled code that asks for no more is not compiled for each form."""

    def set(self, form: Form) -> None:
        self.value, self.own = form, form is Form.OWN


@dataclass(frozen=True)
class LoraContext:
    """What all sites of a model share: the op and the fixed buffers that it reads."""

    ops: LoraOps
    arena: Tensor
    tables: SlotTables
    routing: Routing
    own: OwnParts
    opaque_ops: int | None = None
    """Where layers are compiled: the number by which ``ops.opaque`` finds the op."""
    form: StepForm = field(default_factory=StepForm)


class LoraLinear(nn.Module):
    """Wraps whatever linear is there (plain, transposed, quantised)."""

    def __init__(self, base: nn.Module, site: Site, context: LoraContext, place: int) -> None:
        """``place``: of the site's members among the own parts."""
        super().__init__()
        self.base = base
        self.site = site
        self.context = context
        self.place = place

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
            if ctx.own.active:
                ctx.own.change(self.place, y_rows, x_rows)
        return y

    def rehearse(self, num_rows: int, *, few: bool) -> None:
        """Launch LoRA for rows of which none has any, for what is made at a first launch."""
        rehearse_site(self.site, self.context, self.context.routing, num_rows, few=few)


def rehearse_site(
    site: Site, context: LoraContext, routing: Routing, num_rows: int, *, few: bool
) -> None:
    """Launch a site's LoRA for so many rows, which ``routing`` is set up for."""
    routing.fill([], [], num_rows, few=few)
    out_features = sum(part.size for part in site.slices)
    x = context.arena.new_zeros(num_rows, site.in_features)
    y = context.arena.new_zeros(num_rows, out_features)
    context.ops.lora_add_(y, x, site, context.arena, context.tables, routing)


class CompiledLoraLinear(nn.Module):
    """The same for layers that are compiled, around a linear with an ordinary weight.

    All that is particular to one layer is a tensor, so that layers share their compilation.
    """

    def __init__(
        self, base: nn.Module, weight: Tensor, site: Site, context: LoraContext, place: int
    ) -> None:
        """weight ``[out, in]``, which may be a view of the base's; ``place`` as in LoraLinear."""
        super().__init__()
        self.base = base
        self.sizes = [part.size for part in site.slices]
        assert context.opaque_ops is not None, "this LoRA op cannot run inside compiled layers"
        self.ops = context.opaque_ops
        self.form = context.form
        self.own = context.own.number
        self.register_buffer("place", torch.tensor(place), persistent=False)
        first = site.slices[0].module
        self.register_buffer("rows", weight, persistent=False)
        self.register_buffer("bias", site.bias, persistent=False)
        table = context.tables.table[first : first + len(site.slices)]
        self.register_buffer("table", table, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The base's; some modelling code asks for its dtype."""
        return cast(Tensor, self.base.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[1, T, in]`` -> ``[1, T, out]``."""
        form = self.form.value
        rows = x.reshape(-1, x.shape[-1])
        if form is Form.NONE:
            y = linear(rows, self.rows, self.bias)
        elif form is Form.BESIDE:
            y, delta = lora_beside(rows, self.rows, self.bias, self.table, self.sizes, self.ops)
            y = y + delta
        else:
            y = lora_in_place(rows, self.rows, self.bias, self.table, self.sizes, self.ops)
            if form is Form.OWN:
                y = own_rows(y, rows, self.place, self.own)
        return y.view(*x.shape[:-1], -1)
