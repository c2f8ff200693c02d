"""What an adapter says, once its files are understood: the one form that all formats end in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.types import AdapterId


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear module of the base: ``y [*, out_features] = W x [*, in_features] (+ bias)``."""

    in_features: int
    out_features: int


@dataclass(frozen=True)
class BaseLayout:
    """The modules of the base model that is really loaded, as far as adapters may name them."""

    name: str
    modules: Mapping[str, ModuleShape]
    """Linears that can take LoRA, by full name (``model.layers.0.self_attn.q_proj``)."""
    other_modules: frozenset[str] = frozenset()
    """Modules that exist but cannot take LoRA, so that a refusal can say so."""


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """``y = g * (W x + scale * B A x) + bias`` on one module; ``g`` is 1 unless there is DoRA.

    ``a``, ``b`` and ``magnitude`` are names of the adapter's tensors: A ``[rank, in]``, B
    ``[out, rank]``, DoRA magnitude ``[out]``.
    """

    module: str
    rank: int
    scale: float
    a: str
    b: str
    magnitude: str | None = None


@dataclass(frozen=True)
class LoraSpec:
    """A whole adapter: every tensor of it is named by exactly one delta."""

    deltas: tuple[ModuleDelta, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def max_rank(self) -> int:
        return max(delta.rank for delta in self.deltas)


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that has been read and checked; ``content`` is the worker's own business."""

    adapter_id: AdapterId
    num_bytes: int
    max_rank: int
    warnings: tuple[str, ...]
    content: object
