"""LoRA on parameters that hold all experts of a layer, taken apart into deltas of each expert."""

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
from loramux.adapters.formats.places import WRAPPED
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.report import Report
from loramux.adapters.spec import ExpertShare, ExpertsShape, ModuleDelta


@dataclass(frozen=True)
class ExpertTensors:
    """A and B of one parameter, by name; ``path`` is the module's as the adapter has it."""

    path: str
    a: str
    b: str


@dataclass(frozen=True)
class Unfolded:
    """What one parameter's tensors come to."""

    deltas: tuple[ModuleDelta, ...]
    shares: tuple[ExpertShare, ...]


class ExpertsBuilder:
    """Tells which parameter tensors are meant for, and cuts them; what is wrong goes to a report.

    A file does not name the parameter, but no two of a layer have the same shape.
    """

    def __init__(self, config: Meaning, entries: Mapping[str, TensorEntry], report: Report) -> None:
        self._config = config
        self._entries = entries
        self._report = report

    def unfold(self, experts: str, shape: ExpertsShape, given: ExpertTensors) -> Unfolded | None:
        """``experts``: the base's name of the module. Raises BadPattern."""
        a, b = self._entries[given.a].shape, self._entries[given.b].shape
        features = (a[1:], b[:1])
        gate_up = ((shape.hidden,), (2 * shape.intermediate,))
        down = ((shape.intermediate,), (shape.hidden,))
        if len(a) != 2 or len(b) != 2 or features not in (gate_up, down):
            self._report.refuse(
                f"shapes {list(a)} and {list(b)} fit neither {GATE_UP_PARAMETER} "
                f"{[*gate_up[1], *gate_up[0]]} nor {DOWN_PARAMETER} {[*down[1], *down[0]]} of "
                f"{shape.num_experts} experts",
                given.path,
            )
            return None
        parameter = GATE_UP_PARAMETER if features == gate_up else DOWN_PARAMETER
        rank, scale = self._config.rank_and_scale(f"{given.path.removesuffix(WRAPPED)}.{parameter}")
        if (a[0], b[1]) != (rank * shape.num_experts,) * 2:
            self._report.refuse(
                f"A has {a[0]} rows and B {b[1]} columns where {shape.num_experts} experts of rank "
                f"{rank}, as the configuration says, have {rank * shape.num_experts}",
                given.path,
            )
            return None
        shares = [
            (ExpertShare(given.a, e, shape.num_experts, of_b=False),
             ExpertShare(given.b, e, shape.num_experts, of_b=True))
            for e in range(shape.num_experts)
        ]  # fmt: skip
        deltas = [
            ModuleDelta(
                expert_part(experts, e, part), rank, scale, of_a.name, of_b.name, stored_rows=rows
            )
            for e, (of_a, of_b) in enumerate(shares)
            for part, rows in self._parts(parameter, shape)
        ]
        return Unfolded(tuple(deltas), tuple(share for pair in shares for share in pair))

    def _parts(self, parameter: str, shape: ExpertsShape) -> list[tuple[str, tuple[range, ...]]]:
        """The projections in a parameter, and which rows of B are theirs."""
        if parameter == DOWN_PARAMETER:
            return [(DOWN, ())]
        halves = [(shape.gate_rows,), (shape.up_rows,)]
        if self._config.swap_gate_up:
            halves.reverse()
        return list(zip((GATE, UP), halves, strict=True))
