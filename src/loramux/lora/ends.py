"""Embedding, head and norms, which some adapters change; for all others they are the base's."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from loramux.lora.layers import LoraContext, rehearse_site
from loramux.lora.own import OwnModule, Rows
from loramux.lora.wrapper import Wrapper
from loramux.ops.interface import Site, Slice
from loramux.ops.opaque import own_rows
from loramux.ops.reference import module_views


class AdaptedNorm(Wrapper):
    """A norm whose weight an adapter may have its own values for."""

    def __init__(self, base: nn.Module, context: LoraContext, place: int, tokens_at: int) -> None:
        """``tokens_at``: the dimension of its input in which the tokens are."""
        super().__init__(base, context)
        self.tokens_at = tokens_at
        self.form = context.form
        self.own = context.own.number
        self.register_buffer("place", torch.tensor(place), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[1, …, T, …, size]`` -> the same shape."""
        y = self.base(x)
        if self.form.own:
            x, y = (t.movedim(self.tokens_at, 0) for t in (x, y))
            y = own_rows(y, x, self.place, self.own).movedim(0, self.tokens_at)
        return y


class AdaptedEmbedding(Wrapper):
    """The input embedding, on which an adapter may have LoRA, or rows of its own."""

    def __init__(
        self, base: nn.Embedding, name: str, part: Slice, context: LoraContext, scale: Tensor | None
    ) -> None:
        """``part`` is the embedding as a linear over one-hot vectors; the base multiplies what it
        finds by ``scale``."""
        super().__init__(base, context)
        self.name = name
        self.part = part
        self.factor = scale
        self.vocab_size = base.num_embeddings

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids ``[1, T]`` -> ``[1, T, hidden]``."""
        context = self.context
        known = token_ids
        if context.own.widest is not None:
            # Tokens that the base lacks are in rows of adapters alone, which are replaced below.
            known = token_ids.clamp(max=self.vocab_size - 1)
        y = self.base(known)
        if context.own.active:
            for rows, own in context.own.find(self.name, context.routing):
                y[0, rows] = self._own(own, token_ids[0, rows], y[0, rows])
            self._add_lora(y[0], token_ids[0])
        return y

    def _own(self, own: OwnModule, token_ids: Tensor, y: Tensor) -> Tensor:
        """What an adapter's own embedding, or its own rows of the base's, make of tokens."""
        if own.parameters:
            y = functional_call(self.base, own.parameters, (token_ids,))
        if own.rows is not None:
            numbers, values = own.rows
            place = torch.searchsorted(numbers, token_ids).clamp_(max=len(numbers) - 1)
            found = self._scaled(values[place])
            y = torch.where((numbers[place] == token_ids)[:, None], found, y)
        return y

    def _add_lora(self, y: Tensor, token_ids: Tensor) -> None:
        """y = g * (y + scale * B A[:, token]) for the rows whose adapter has LoRA here."""
        context = self.context
        for segment in context.routing.segments:
            views = module_views(
                self.part, segment.slot, self.vocab_size, context.arena, context.tables
            )
            if views.a_t is None:
                continue
            rows: Rows = context.routing.rows_of(segment)
            changed = y[rows] + self._scaled(views.a_t[token_ids[rows]] @ views.b_t)
            y[rows] = changed if views.gain is None else changed * views.gain

    def _scaled(self, vectors: Tensor) -> Tensor:
        return vectors if self.factor is None else vectors * self.factor.to(vectors.dtype)


class AdaptedHead(Wrapper):
    """The output head, which an adapter may change as any linear, or in some rows."""

    def __init__(self, base: nn.Module, name: str, module: int, context: LoraContext) -> None:
        """``module``: its row of the slot tables."""
        super().__init__(base, context)
        self.name = name
        weight, bias = cast(Tensor, base.weight), cast("Tensor | None", base.bias)
        self.vocab_size = weight.shape[0]
        self.site = Site((Slice(module, 0, self.vocab_size),), weight.shape[1], bias)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[1, R, hidden]`` -> logits ``[1, R, vocab]``.

        They are as wide as the largest vocabulary of the step. What a row has beyond its own
        adapter's means nothing: those who read the logits must not look at it.
        """
        y = self.base(x)
        ctx = self.context
        if not ctx.own.active:
            return y
        y_rows, x_rows = y[0], x[0].contiguous()
        found = ctx.own.find(self.name, ctx.own.head_routing)
        grown = [(rows, own) for rows, own in found if self._has_grown(own)]
        alike = [(rows, own) for rows, own in found if not self._has_grown(own)]
        for rows, own in alike:
            y_rows[rows] = self._own(own, x_rows[rows], y_rows[rows])
        ctx.ops.lora_add_(y_rows, x_rows, self.site, ctx.arena, ctx.tables, ctx.own.head_routing)
        for rows, own in alike:
            if own.shift is not None:
                y_rows[rows] = y_rows[rows] + own.shift
        if ctx.own.widest is None:
            return y
        wide = F.pad(y, (0, ctx.own.widest - self.vocab_size))
        for rows, own in grown:
            logits = self._own(own, x_rows[rows], y_rows[rows])
            wide[0, rows, : logits.shape[-1]] = logits
        return wide

    def rehearse(self, num_rows: int, *, few: bool) -> None:
        """Launch LoRA for rows of which none has any, for what is made at a first launch."""
        rehearse_site(self.site, self.context, self.context.own.head_routing, num_rows, few=few)

    def _has_grown(self, own: OwnModule) -> bool:
        """Whether this is a head for more tokens than the base's, as a whole and without LoRA."""
        weight = own.parameters.get("weight")
        return weight is not None and weight.shape[0] > self.vocab_size

    def _own(self, own: OwnModule, x: Tensor, y: Tensor) -> Tensor:
        """Logits by an adapter's own head, or own rows of the base's, which makes ``y``."""
        if own.parameters:
            y = functional_call(self.base, own.parameters, (x,))
        if own.rows is not None:
            numbers, values = own.rows
            bias = own.parameters.get("bias", self.site.bias)
            y = y.clone()
            y[:, numbers] = F.linear(x, values, None if bias is None else bias[numbers])
        return y
