"""The experts of a base that an adapter's own tensors tell of, where there is no base to ask."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from loramux.adapters.experts import DOWN, DOWN_PARAMETER, GATE_UP_PARAMETER, PARTS, parts_in
from loramux.adapters.formats.peft_keys import Part
from loramux.adapters.formats.places import WRAPPED
from loramux.adapters.spec import ExpertsShape

_HOLDER = "experts"
_MAX_PROJECTIONS = 100_000
"""Of all layers together, more than any base has: a hostile file may tell of any number."""

Shapes = Mapping[str, Mapping[Part, tuple[int, ...]]]
"""Of A and B, by the adapter's own name of the module."""


def told_experts(
    shapes: Shapes, rank: int | None, parameters: Collection[str]
) -> dict[str, ExpertsShape]:
    """By the name of the module of all experts. What does not agree is told when it is checked.

    ``rank`` and ``parameters`` (ends of names) as the configuration has them.
    """
    found: dict[str, ExpertsShape] = {}
    on_parameters: dict[str, list[ExpertsShape]] = {}
    for path, sides in shapes.items():
        a, b = sides.get("lora_A", ()), sides.get("lora_B", ())
        module, parts = holder(path)
        if module is None or not (2 <= len(a) <= 3 and 2 <= len(b) <= 3):
            continue
        if not parts:
            num_experts = a[0] if len(a) == 3 else a[0] // (rank or 1)
            shape = ExpertsShape(num_experts, a[-1], b[0] // 2)  # if it is on gate_up_proj
            on_parameters.setdefault(module, []).append(shape)
        elif len(a) + len(b) > 4:
            num_experts = max(side[0] for side in (a, b) if len(side) == 3)
            into, out = a[-1], b[-2]
            hidden, size = (out, into) if parts == (DOWN,) else (into, out // len(parts))
            found[module] = ExpertsShape(num_experts, hidden, size)
    for module, told in on_parameters.items():
        found[module] = _of_parameters(told, parameters)
    total = sum(len(PARTS) * shape.num_experts for shape in found.values())
    return found if total <= _MAX_PROJECTIONS else {}


def holder(path: str) -> tuple[str | None, tuple[str, ...]]:
    """The module of all experts that a name of the adapter is in, and the projections it means."""
    parent, _, leaf = path.rpartition(".")
    parts = parts_in(leaf)
    module = parent if parts else path.removesuffix(WRAPPED)
    return (module if module.rpartition(".")[2] == _HOLDER else None), parts


def _of_parameters(told: list[ExpertsShape], parameters: Collection[str]) -> ExpertsShape:
    """``told``: each as if it were of gate_up_proj, one of which may be of down_proj."""
    ends = {name.rpartition(".")[2] for name in parameters}
    for gate_up in told:
        down = ExpertsShape(gate_up.num_experts, gate_up.intermediate, gate_up.hidden // 2)
        if down in told:
            return gate_up
    first = told[0]
    if DOWN_PARAMETER in ends and GATE_UP_PARAMETER not in ends:
        return ExpertsShape(first.num_experts, 2 * first.intermediate, first.hidden)
    return first
