"""What an attention backend must do: paged attention over all sequences of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShape:
    """Key and value heads of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class AttentionSequence(NamedTuple):
    """``num_tokens`` rows of a step, from ``first_row`` on, are one sequence's newest tokens."""

    first_row: int
    num_tokens: int
    num_cached: int
    """Tokens before them, whose keys and values are in the blocks."""
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer may vary."""

    scale: float
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; None sees all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` before the softmax."""
    sinks: tuple[float, ...] | None = None
    """One score for each head that takes part in the softmax and stands for no token."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer of a model, as its examination found it."""

    num_heads: int
    kv: KvShape
    params: AttentionParams


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Write k and v ``[T, kv heads, dim]`` to the cache; then q ``[T, heads, dim]`` attends.

All are written before any is read: a sequence may have blocks in its table that another one writes
in the same step.
Called as ``attend(q, k, v)``; returns ``[T, heads, value dim]``. Query heads share key heads in
consecutive groups.
"""


class StepKind(Enum):
    """How a step's forward is run."""

    EAGER = "eager"
    """Called as it is."""
    DECODE = "decode"
    """Captured or replayed; every sequence has one row."""
    MIXED = "mixed"
    """Captured or replayed; sequences have any numbers of rows."""


class AttentionBackend(Protocol):
    """Keeps the KV cache and computes causal attention; chosen once at start."""

    name: str

    @property
    def kv_bytes(self) -> int:
        """Memory of all keys and values."""
        ...

    def begin_step(
        self,
        sequences: Sequence[AttentionSequence],
        num_rows: int | None = None,
        kind: StepKind = StepKind.EAGER,
    ) -> None:
        """Say which sequences the next forward is about.

        ``num_rows`` rows are computed; those behind the sequences' own are padding, which reads
        and writes a spare block.
        """
        ...

    def layer(self, layer: int) -> Attend:
        """What computes one layer; a module where the layers are compiled."""
        ...
