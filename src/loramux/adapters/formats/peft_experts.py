"""LoRA on all experts of a layer in two tensors, taken apart into deltas of each expert.

There are two families of names, for n experts:

    experts, experts.base_layer              on a parameter: PEFT's target_parameters
        A  [n * rank, in]   or [n, rank, in]
        B  [out, rank * n]  or [out, rank, n]
    experts.w1, experts.gate_up_proj, ...    on a projection: SGLang, vLLM
        A  [n, rank, in]
        B  [n, out, rank]

In the second, 1 in place of n says that all experts share that side (shared-outer); it may also
have two dimensions where the other side has three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loramux.adapters.experts import (
    DOWN,
    DOWN_PARAMETER,
    GATE,
    GATE_UP_PARAMETER,
    UP,
    expert_part,
)
from loramux.adapters.formats.meaning import Meaning
from loramux.adapters.formats.places import WRAPPED, ExpertsPlace
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.report import Report
from loramux.adapters.spec import ExpertShare, ExpertsShape, ModuleDelta, Stacking


@dataclass(frozen=True)
class ExpertTensors:
    """A and B of all experts, by name; ``path`` is the module's as the adapter has it."""

    path: str
    a: str
    b: str


@dataclass(frozen=True)
class Unfolded:
    """What the two tensors come to."""

    deltas: tuple[ModuleDelta, ...]
    shares: tuple[ExpertShare, ...]


@dataclass(frozen=True)
class _Side:
    """An A or a B of all experts, as its shape tells."""

    tensor: str
    features: int
    """Inputs of A, outputs of B."""
    extent: int
    """The rank, or ``ranks`` times that."""
    num_experts: int
    """1 where all share it."""
    stacking: Stacking | None
    """None: it is the tensor as it is."""

    @property
    def ranks(self) -> int:
        """How many experts' ranks stand side by side in ``extent``."""
        return 1 if self.stacking in (None, Stacking.FIRST, Stacking.LAST) else self.num_experts

    def share_of(self, expert: int) -> ExpertShare | None:
        if self.stacking is None:
            return None
        expert = 0 if self.num_experts == 1 else expert
        return ExpertShare(self.tensor, expert, self.num_experts, self.stacking)


class ExpertsBuilder:
    """Tells what tensors are meant for, and cuts them; what is wrong goes to a report."""

    def __init__(self, config: Meaning, entries: Mapping[str, TensorEntry], report: Report) -> None:
        self._config = config
        self._entries = entries
        self._report = report

    def unfold(
        self, place: ExpertsPlace, shape: ExpertsShape, given: ExpertTensors
    ) -> Unfolded | None:
        """None after a refusal. Raises BadPattern."""
        a, b = self._sides(place, shape.num_experts, given)
        parts = None if a is None or b is None else _parts(place, shape, (a.features, b.features))
        if a is None or b is None or parts is None:
            self._refuse_shapes(place, shape, given)
            return None
        rank, scale = self._config.rank_and_scale(_pattern_name(place, parts, given.path))
        if (a.extent, b.extent) != (rank * a.ranks, rank * b.ranks):
            self._refuse_rank(rank, a, b, given.path)
            return None
        deltas: list[ModuleDelta] = []
        shares: dict[ExpertShare, None] = {}
        for expert in range(shape.num_experts):
            share_a, share_b = a.share_of(expert), b.share_of(expert)
            shares.update(dict.fromkeys(s for s in (share_a, share_b) if s is not None))
            name_a = a.tensor if share_a is None else share_a.name
            name_b = b.tensor if share_b is None else share_b.name
            for part, rows in self._rows_of_b(parts, shape):
                module = expert_part(place.experts, expert, part)
                deltas.append(ModuleDelta(module, rank, scale, name_a, name_b, stored_rows=rows))
        return Unfolded(tuple(deltas), tuple(shares))

    def _sides(
        self, place: ExpertsPlace, num_experts: int, given: ExpertTensors
    ) -> tuple[_Side | None, _Side | None]:
        """A and B; None where there is no such form."""
        a, b = self._entries[given.a].shape, self._entries[given.b].shape
        if not place.parts:
            return (
                _rows_or_first(given.a, a, num_experts),
                _columns_or_last(given.b, b, num_experts, self._config.beside.expert_columns),
            )
        if len(a) == len(b) == 2:  # of which expert?
            return None, None
        return (
            _of_projection(given.a, a, num_experts, of_b=False),
            _of_projection(given.b, b, num_experts, of_b=True),
        )

    def _rows_of_b(
        self, parts: tuple[str, ...], shape: ExpertsShape
    ) -> list[tuple[str, tuple[range, ...]]]:
        """The projections, and which rows of B are theirs."""
        if len(parts) == 1:
            return [(parts[0], ())]
        halves = [(shape.gate_rows,), (shape.up_rows,)]
        if self._config.swap_gate_up:
            halves.reverse()
        return list(zip(parts, halves, strict=True))

    def _refuse_shapes(
        self, place: ExpertsPlace, shape: ExpertsShape, given: ExpertTensors
    ) -> None:
        a, b = (list(self._entries[name].shape) for name in (given.a, given.b))
        n = shape.num_experts
        if not place.parts:
            gate_up, down = (_features(parts, shape)[::-1] for parts in _PARAMETERS)
            self._report.refuse(
                f"shapes {a} and {b} fit neither {GATE_UP_PARAMETER} {list(gate_up)} nor "
                f"{DOWN_PARAMETER} {list(down)} of {n} experts",
                given.path,
            )
            return
        into, out = _features(place.parts, shape)
        self._report.refuse(
            f"shapes {a} and {b} where all {n} experts have [{n}, rank, {into}] and "
            f"[{n}, {out}, rank], with 1 for {n} on a side that all share",
            given.path,
        )

    def _refuse_rank(self, rank: int, a: _Side, b: _Side, path: str) -> None:
        if a.ranks == b.ranks == 1:
            reason = f"A has rank {a.extent} and B {b.extent}, the configuration says rank {rank}"
        else:
            reason = (
                f"A has {a.extent} rows and B {b.extent} columns where {a.num_experts} experts of "
                f"rank {rank}, as the configuration says, have {rank * a.ranks}"
            )
            if a.ranks != b.ranks:
                reason += f" and {rank * b.ranks}"
        self._report.refuse(reason, path)


_PARAMETERS = ((GATE, UP), (DOWN,))
"""The projections in each of the two, of which no file says the name."""


def _rows_or_first(tensor: str, shape: tuple[int, ...], num_experts: int) -> _Side | None:
    """A of a parameter."""
    if len(shape) == 2:
        return _Side(tensor, shape[1], shape[0], num_experts, Stacking.ROWS)
    if len(shape) == 3 and shape[0] == num_experts:
        return _Side(tensor, shape[2], shape[1], num_experts, Stacking.FIRST)
    return None


def _columns_or_last(
    tensor: str, shape: tuple[int, ...], num_experts: int, columns: Stacking
) -> _Side | None:
    """B of a parameter."""
    if len(shape) == 2:
        return _Side(tensor, shape[0], shape[1], num_experts, columns)
    if len(shape) == 3 and shape[2] == num_experts:
        return _Side(tensor, shape[0], shape[1], num_experts, Stacking.LAST)
    return None


def _of_projection(
    tensor: str, shape: tuple[int, ...], num_experts: int, *, of_b: bool
) -> _Side | None:
    """A or B of a projection."""
    if len(shape) not in (2, 3):
        return None
    rank, features = shape[:-3:-1] if of_b else shape[-2:]
    if len(shape) == 2:
        return _Side(tensor, features, rank, 1, None)
    if shape[0] in (1, num_experts):
        return _Side(tensor, features, rank, shape[0], Stacking.FIRST)
    return None


def _features(parts: tuple[str, ...], shape: ExpertsShape) -> tuple[int, int]:
    """Inputs and outputs of these projections of one expert together."""
    if parts == (DOWN,):
        return shape.intermediate, shape.hidden
    return shape.hidden, len(parts) * shape.intermediate


def _parts(
    place: ExpertsPlace, shape: ExpertsShape, features: tuple[int, int]
) -> tuple[str, ...] | None:
    """The projections that are meant. No two parameters of a layer have the same shape."""
    meant = (place.parts,) if place.parts else _PARAMETERS
    return next((parts for parts in meant if _features(parts, shape) == features), None)


def _pattern_name(place: ExpertsPlace, parts: tuple[str, ...], path: str) -> str:
    """By which rank_pattern and alpha_pattern know it."""
    if place.parts:
        return path
    parameter = DOWN_PARAMETER if parts == (DOWN,) else GATE_UP_PARAMETER
    return f"{path.removesuffix(WRAPPED)}.{parameter}"
