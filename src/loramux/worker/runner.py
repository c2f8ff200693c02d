"""What computes a step: the parts that its kinds have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from loramux.lora.layers import Form, LoraContext
from loramux.ops.attention import AttentionBackend
from loramux.ops.tiles import FEW_ADAPTERS
from loramux.plan import SequenceStep
from loramux.types import Slot
from loramux.worker.graphs import GraphKey
from loramux.worker.inputs import StepInputs

Progress = Callable[[str, Sequence[GraphKey]], Iterable[GraphKey]]
"""Takes what is done for each key, passes the keys on, and may show how far it has come."""


@dataclass(frozen=True)
class Captured:
    """What has been captured at start, and how long that took."""

    num_graphs: int = 0
    num_bytes: int = 0
    """Device memory of the graphs and their pool."""
    compile_seconds: float = 0.0
    """Before anything was captured."""
    capture_seconds: float = 0.0


class Computed(NamedTuple):
    """What a step's forward has made, good until the next step."""

    logits: Tensor
    """``[rows, vocab]`` of the step's ``logit_rows``, as wide as the largest vocabulary of the
    step; see ``AdaptedHead``."""
    states: Tensor | None
    """``[T, hidden]``, what the head was given the ``logit_rows`` of. None for a step of which each
    token's logits are needed, which asks for no hidden states."""


class Runner(Protocol):
    """Computes a step."""

    def run(
        self, inputs: StepInputs, sequences: Sequence[SequenceStep], last_tokens: Tensor
    ) -> Computed:
        """``last_tokens``: what the step before samples, on the device."""
        ...

    @property
    def first_graphs(self) -> list[GraphKey]:
        """What ``warm_up`` captures."""
        ...

    def warm_up(self, progress: Progress, *, step_bytes: int = 0) -> Captured:
        """Do at start what the first steps would have to wait for.

        ``step_bytes`` of the device's memory are left to steps by what is captured later.
        """
        ...

    def expect(self, max_rank: int, *, has_gain: bool) -> None:
        """An adapter of this rank, with DoRA or without, may take part in steps from now on."""
        ...

    def use_spare_time(self) -> bool:
        """Do a part of what later steps would be slower without; False when nothing is left."""
        ...

    def use_attention(self, backend: AttentionBackend) -> None:
        """Go over to another backend, to which the model is connected already."""
        ...


def mix_of(slots: Iterable[Slot], context: LoraContext) -> tuple[int, bool, Form]:
    """The largest rank of a step, whether few adapters take part, and the form that it needs.

    The base is none of the adapters.
    """
    adapters = {*slots} - {context.routing.num_slots}
    tables, few = context.tables, len(adapters) <= FEW_ADAPTERS
    if not adapters:
        return 0, few, Form.NONE
    form = Form.IN_PLACE if any(tables.has_gain[slot] for slot in adapters) else Form.BESIDE
    if context.own.any_of(adapters):
        form = Form.OWN
    return max(tables.max_rank[slot] for slot in adapters), few, form
