"""What slots' adapters have of their own, beside LoRA, put to work in the rows of a step.

Few adapters have any of it (``modules_to_save``, trained biases, LoRA on embeddings or the head),
so it is plain torch, row by row of the adapters that do; all other rows keep every bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from loramux.lora.own_weights import OwnTensor
from loramux.lora.routing import Routing
from loramux.ops.opaque import register_own
from loramux.types import Slot

Rows = slice | Tensor
"""Rows of a step, in order of the sequences."""


@dataclass
class OwnModule:
    """What one adapter has of its own for one module; views of the arena."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Whole ones, by name."""
    rows: tuple[Tensor, Tensor] | None = None
    """Single rows of the weight: ascending numbers int64 ``[n]``, and values ``[n, hidden]``."""
    shift: Tensor | None = None
    """Added to what a linear gives, ``[out]``."""

    def result(self, base: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What this module makes of rows of ``x``, where the base and LoRA make ``y``."""
        if self.parameters:
            y = functional_call(base, self.parameters, (x,))
        return y if self.shift is None else y + self.shift


@dataclass(frozen=True)
class Member:
    """A module of the base, as adapters name it."""

    name: str
    base: nn.Module
    columns: slice = field(default_factory=lambda: slice(None))
    """Its part of what the site computes."""


class OwnParts:
    """The own parts of the adapters in the slots, by module, and where they take effect."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        device = routing.token_slot.device
        self.head_routing = Routing(routing.num_slots, routing.max_tokens, device)
        """The rows whose logits are computed, where a step has such parts."""
        self._slots: list[dict[str, OwnModule]] = [{} for _ in range(routing.num_slots + 1)]
        self._ends = [False] * len(self._slots)
        self._vocab_sizes: list[int | None] = [None] * len(self._slots)
        self._places: list[tuple[Member, ...]] = []
        self.active = False
        """Whether any adapter of the current step has such parts."""
        self.widest: int | None = None
        """The largest vocabulary of the current step, where it is larger than the base's."""
        self.number = register_own(self)
        """By which ``ops.opaque`` finds them."""

    def set(
        self,
        slot: Slot,
        own: Sequence[OwnTensor],
        block: Tensor,
        *,
        ends: bool,
        vocab_size: int | None = None,
    ) -> None:
        """Say what a slot's adapter has; ``ends``: whether LoRA is on its embedding or head.

        ``block``: the part of the arena where it stands. ``vocab_size``: as of ``HostCopy``.
        """
        modules: dict[str, OwnModule] = {}
        for tensor in own:
            module, view = modules.setdefault(tensor.module, OwnModule()), tensor.view(block)
            if tensor.rows is not None:
                module.rows = torch.tensor(tensor.rows, device=block.device), view
            elif tensor.kind == "shift":
                module.shift = view
            else:
                module.parameters[tensor.kind] = view
        self._slots[slot], self._ends[slot] = modules, ends
        self._vocab_sizes[slot] = vocab_size

    def clear(self, slot: Slot) -> None:
        self._slots[slot], self._ends[slot] = {}, False
        self._vocab_sizes[slot] = None

    def vocab_size_of(self, slot: Slot) -> int | None:
        """Tokens of a slot's adapter; None: as many as the base's."""
        return self._vocab_sizes[slot]

    def begin_step(
        self,
        slots: Sequence[Slot],
        tokens_per_seq: Sequence[int],
        logit_rows: np.ndarray,
        *,
        num_logits: int,
        few: bool,
    ) -> None:
        """Say whose rows the step has, as ``Routing.fill`` takes them, and which have logits.

        ``num_logits`` rows are computed, padding included.
        """
        distinct = {*slots}
        self.active = self.any_of(distinct)
        sizes = (self._vocab_sizes[slot] for slot in distinct)
        self.widest = max((size for size in sizes if size is not None), default=None)
        if self.active:
            heads = np.repeat(np.asarray(slots), np.asarray(tokens_per_seq))[logit_rows].tolist()
            self.head_routing.fill(heads, [1] * len(heads), num_logits, few=few)

    def any_of(self, slots: Iterable[Slot]) -> bool:
        """Whether an adapter of these slots has anything beside LoRA in the layers."""
        return any(self._ends[slot] or self._slots[slot] for slot in slots)

    def find(self, module: str, routing: Routing) -> list[tuple[Rows, OwnModule]]:
        """The rows of a step in which a module is another one, and which."""
        return [
            (routing.rows_of(segment), own)
            for segment in routing.segments
            if (own := self._slots[segment.slot].get(module)) is not None
        ]

    def add_place(self, *members: Member) -> int:
        """A place in the model at which ``change`` will be called for these modules."""
        self._places.append(members)
        return len(self._places) - 1

    def change(self, place: int, y: Tensor, x: Tensor) -> None:
        """Give the rows of adapters that have own parts here what these make of ``x``.

        x ``[T, …]``; y ``[T, …]``, what the base and LoRA have made of it.
        """
        for member in self._places[place]:
            part = y[..., member.columns]
            for rows, own in self.find(member.name, self._routing):
                part[rows] = own.result(member.base, x[rows], part[rows])

    def change_all(self, place: int, results: Sequence[Tensor], x: Tensor) -> None:
        """``change`` for one module that gives several tensors, each with a row for each token."""
        [member] = self._places[place]
        for rows, own in self.find(member.name, self._routing):
            mine = functional_call(member.base, own.parameters, (x[rows],))
            for result, part in zip(results, mine, strict=True):
                result[rows] = part
