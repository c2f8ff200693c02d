"""What an adapter says, once its files are understood: the one form that all formats end in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from loramux.types import AdapterId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear module of the base: ``y [*, out_features] = W x [*, in_features] (+ bias)``."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of one layer: ``down (act(gate x) * up x)`` in each."""

    num_experts: int
    hidden: int
    intermediate: int
    interleaved: bool = False
    """Whether gate and up take turns in the parameter that has both."""

    @property
    def gate_rows(self) -> range:
        """Of what that parameter gives."""
        return range(0, 2 * self.intermediate, 2) if self.interleaved else range(self.intermediate)

    @property
    def up_rows(self) -> range:
        size = self.intermediate
        return range(1, 2 * size, 2) if self.interleaved else range(size, 2 * size)


@dataclass(frozen=True, slots=True)
class Fusion:
    """One linear that some models hold as several: the rows of ``parts``, one after another.

    The base has either ``fused`` or all ``parts``; an adapter may have been made for the other
    form. All names are full names, as the base would spell them.
    """

    fused: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    """Output rows of each part."""
    in_features: int
    order_is_known: bool
    """Whether the fused form is known to hold the parts in this order."""

    @property
    def rows(self) -> tuple[range, ...]:
        """Rows of each part in the fused linear."""
        ends = accumulate(self.sizes)
        return tuple(range(end - size, end) for end, size in zip(ends, self.sizes, strict=True))


class HeadCounts(NamedTuple):
    """Heads of one attention layer; query heads share key heads in consecutive groups."""

    query: int
    key_value: int


@dataclass(frozen=True)
class OpenModules:
    """The modules that adapters may change, where the operator has named some."""

    words: str
    """As the operator wrote them."""
    names: frozenset[str]
    """Modules of the base by full name, and parts of those that others have as several."""


@dataclass(frozen=True)
class BaseLayout:
    """The modules of the base model that is really loaded, as far as adapters may name them."""

    name: str
    modules: Mapping[str, ModuleShape]
    """Linears that can take LoRA, by full name (``model.layers.0.self_attn.q_proj``)."""
    other_modules: frozenset[str] = frozenset()
    """Modules that exist but cannot take LoRA, so that a refusal can say so."""
    model_type: str = "unknown"
    """What transformers calls the family of the text model."""
    fusions: tuple[Fusion, ...] = ()
    """Linears that adapters may have in one where this base has them apart, and the reverse."""
    replaceable: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    """Modules of whose parameters an adapter may bring its own values: shapes by ``weight`` and
    ``bias``, as the module holds them."""
    embedding: str | None = None
    """The module that turns tokens into vectors. As a linear it reads one-hot vectors, so its
    ``in_features`` is the size of the vocabulary."""
    head: str | None = None
    """The linear that turns vectors into logits."""
    tied: bool = False
    """Embedding and head have one weight."""
    heads: Mapping[int, HeadCounts] = field(default_factory=dict)
    """By number of layer, as far as they are known."""
    experts: Mapping[str, ExpertsShape] = field(default_factory=dict)
    """Modules that hold the experts of a layer; ``modules`` has each projection of each expert."""
    routers: Mapping[str, ModuleShape] = field(default_factory=dict)
    """Modules that choose experts for each token by a weight ``[experts, hidden]``. An adapter's
    delta becomes a weight of its own."""
    open_modules: OpenModules | None = None
    """None: adapters may change all modules."""

    def parts_of(self, module: str, rows: range | None = None) -> list[str]:
        """What is one module here and several elsewhere, part by part, as far as ``rows`` go."""
        fusion = self._known_fusions.get(module)
        if fusion is None:
            return [module]
        pairs = zip(fusion.parts, fusion.rows, strict=True)
        return [part for part, own in pairs if rows is None or _overlap(own, rows)]

    @cached_property
    def _known_fusions(self) -> Mapping[str, Fusion]:
        """By the name of the fused linear, those whose order of rows is known."""
        return {fusion.fused: fusion for fusion in self.fusions if fusion.order_is_known}

    def closed_parts(self, module: str, rows: range | None = None) -> list[str]:
        """Those among them that adapters may not change."""
        if self.open_modules is None:
            return []
        names = self.open_modules.names
        return [part for part in self.parts_of(module, rows) if part not in names]


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """``y = g * (W x + scale * B A x) + bias + scale * c`` on one module.

    ``a``, ``b``, ``magnitude`` and ``b_bias`` are names of the adapter's tensors: A ``[rank, in]``,
    B ``[out, rank]``, DoRA magnitude ``[out]``, and c ``[out]``, the bias of B. Without a magnitude
    ``g`` is 1. Where the adapter's linears are fused otherwise than the base's, the delta changes
    some rows of ``y``, or takes some rows of B, of the magnitude and of c.
    """

    module: str
    rank: int
    scale: float
    a: str
    b: str
    magnitude: str | None = None
    rows: range | None = None
    """Rows of ``y`` that change; None: all."""
    stored_rows: tuple[range, ...] = ()
    """Rows of B and of the magnitude that are meant, in this order; none: all, as they are."""
    b_bias: str | None = None

    def pick(self, stored: Tensor) -> list[Tensor]:
        """The rows of B or of the magnitude that are meant, as pieces to be put together."""
        if not self.stored_rows:
            return [stored]
        return [stored[rows.start : rows.stop : rows.step] for rows in self.stored_rows]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Values of the adapter's own for a parameter of the base (PEFT: modules_to_save, bias)."""

    module: str
    parameter: str
    """``weight`` or ``bias``"""
    tensor: str
    rows: tuple[int, ...] | None = None
    """Rows that the tensor has, in its order; None: all of the parameter's."""
    twin: str | None = None
    """A tensor that must hold the same values, because the base has one weight for both."""


class Stacking(Enum):
    """How one tensor holds the A or the B of several experts; ``n`` is their number."""

    ROWS = "rows"
    """``[n * rank, in]``, expert by expert."""
    COLUMNS = "columns"
    """``[out, rank * n]``: column ``j * n + e`` is rank j of expert e (PEFT,
    ``ParamWrapper.get_delta_weight``)."""
    COLUMN_BLOCKS = "column blocks"
    """``[out, n * rank]``, expert by expert."""
    FIRST = "first"
    """``[n, _, _]``"""
    LAST = "last"
    """``[_, _, n]``"""


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """One expert's part of a tensor that holds those of several: its A or B."""

    source: str
    expert: int
    num_experts: int
    stacking: Stacking

    @property
    def name(self) -> str:
        """What the share is called as a tensor of its own."""
        return f"{self.source}[{self.expert}]"

    def cut(self, whole: Tensor) -> Tensor:
        """A view of the share."""
        match self.stacking:
            case Stacking.ROWS:
                return whole.unflatten(0, (self.num_experts, -1))[self.expert]
            case Stacking.COLUMNS:
                return whole[:, self.expert :: self.num_experts]
            case Stacking.COLUMN_BLOCKS:
                return whole.unflatten(1, (self.num_experts, -1))[:, self.expert]
            case Stacking.FIRST:
                return whole[self.expert]
            case Stacking.LAST:
                return whole[..., self.expert]


@dataclass(frozen=True)
class LoraSpec:
    """A whole adapter: every tensor of it is used, and no row of a module changes twice."""

    deltas: tuple[ModuleDelta, ...]
    warnings: tuple[str, ...] = field(default=())
    replacements: tuple[Replacement, ...] = ()
    vocab_size: int | None = None
    """Tokens of the adapter's own embedding and head, where they are more than the base's."""
    shares: tuple[ExpertShare, ...] = ()
    """Tensors that deltas name and the file has inside larger ones."""

    def by_module(self) -> dict[str, tuple[ModuleDelta, ...]]:
        """Several deltas of one module change different rows of it; their ranks add up."""
        grouped: dict[str, tuple[ModuleDelta, ...]] = {}
        for delta in self.deltas:
            grouped[delta.module] = (*grouped.get(delta.module, ()), delta)
        return grouped

    @property
    def tensor_names(self) -> frozenset[str]:
        """All tensors that the adapter is made of; shares by names of their own."""
        deltas = (name for d in self.deltas for name in (d.a, d.b, d.magnitude, d.b_bias))
        return frozenset(name for name in deltas if name) | {r.tensor for r in self.replacements}

    @property
    def max_rank(self) -> int:
        return max(sum(d.rank for d in deltas) for deltas in self.by_module().values())


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter that has been read and checked; ``content`` is the worker's own business."""

    adapter_id: AdapterId
    num_bytes: int
    max_rank: int
    warnings: tuple[str, ...]
    content: object
    vocab_size: int | None = None
    """Of an adapter that has more tokens than the base."""
