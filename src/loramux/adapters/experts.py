"""Names of what is inside a mixture of experts, which families spell in two ways.

This is the only place that knows which is which: w1 is the gate projection, whose result goes
through the activation, w3 the up projection and w2 the down projection. Each expert's projection
is a module of its own here, whatever tensors the base or the adapter keeps them in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from loramux.adapters.spec import ExpertsShape, ModuleShape

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
PARTS = (GATE, UP, DOWN)
"""Of one expert, in the order of the tables."""

GATE_UP_PARAMETER, DOWN_PARAMETER = "gate_up_proj", "down_proj"
"""Parameters with those of all experts: ``[experts, 2 * intermediate, hidden]``, the gate's rows
before the up projection's or by turns with them, and ``[experts, hidden, intermediate]``."""

OLD_NAMES: Mapping[str, str] = {GATE: "w1", UP: "w3", DOWN: "w2"}
_STACKED = {
    **{leaf: (part,) for part, old in OLD_NAMES.items() for leaf in (part, old)},
    GATE_UP_PARAMETER: (GATE, UP),
}
_INSIDE = re.compile(r"((?:.+\.)?experts)\.(\d{1,9})\.(\w+)")
_NEW_NAMES = {old: part for part, old in OLD_NAMES.items()}
_BLOCKS = ("mlp", "block_sparse_moe")
"""What the module that has the experts and the router is called, now and before."""
_BLOCK = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(_BLOCKS)})\.(?=experts(?:\.|$)|gate$)")


def expert_part(experts: str, expert: int, part: str) -> str:
    """The module that is one projection of one expert; ``experts`` is the module of all."""
    return f"{experts}.{expert}.{part}"


class Inside(NamedTuple):
    """What the name of a module in an expert says."""

    experts: str
    """The module of all."""
    expert: int
    leaf: str


def inside(name: str) -> Inside | None:
    """None for a module that is in no expert."""
    match = _INSIDE.fullmatch(name)
    return None if match is None else Inside(match[1], int(match[2]), match[3])


def expert_modules(experts: Mapping[str, ExpertsShape]) -> Iterator[tuple[str, ModuleShape]]:
    """Every projection of every expert as a module of its own: for each expert ``PARTS``."""
    for name, shape in experts.items():
        into = ModuleShape(shape.hidden, shape.intermediate)
        out = ModuleShape(shape.intermediate, shape.hidden)
        shapes = {GATE: into, UP: into, DOWN: out}
        for expert in range(shape.num_experts):
            for part in PARTS:
                yield expert_part(name, expert, part), shapes[part]


def parts_in(leaf: str) -> tuple[str, ...]:
    """The projections of every expert that ``experts.<leaf>`` holds; none for any other name."""
    return _STACKED.get(leaf, ())


def other_spellings(name: str) -> set[str]:
    """Further names by which a base may have what an adapter calls so: a part of a mixture, its
    router or its experts."""
    if "experts" not in name and not name.endswith("gate"):
        return set()
    found, leaves = inside(name), [name]
    if found is not None and found.leaf in _NEW_NAMES:
        leaves.append(name.removesuffix(found.leaf) + _NEW_NAMES[found.leaf])
    spellings = {_BLOCK.sub(f"{block}.", leaf) for leaf in leaves for block in _BLOCKS}
    return spellings - {name}
