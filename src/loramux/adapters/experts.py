"""Names of what is inside a mixture of experts, which families spell in two ways.

This is the only place that knows which is which: w1 is the gate projection, whose result goes
through the activation, w3 the up projection and w2 the down projection. Each expert's projection
is a module of its own here, whatever tensors the base or the adapter keeps them in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
PARTS = (GATE, UP, DOWN)
"""Of one expert, in the order of the tables."""

GATE_UP_PARAMETER, DOWN_PARAMETER = "gate_up_proj", "down_proj"
"""Parameters with those of all experts: ``[experts, 2 * intermediate, hidden]``, the gate's rows
before the up projection's, and ``[experts, hidden, intermediate]``."""

OLD_NAMES: Mapping[str, str] = {GATE: "w1", UP: "w3", DOWN: "w2"}
_STACKED = {
    **{leaf: (part,) for part, old in OLD_NAMES.items() for leaf in (part, old)},
    GATE_UP_PARAMETER: (GATE, UP),
}
_INSIDE = re.compile(r"(.+)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)")
_BLOCKS = ("mlp", "block_sparse_moe")
"""What the module that has the experts and the router is called, now and before."""
_BLOCK = re.compile(rf"\.(?:{'|'.join(_BLOCKS)})\.(?=experts(?:\.|$)|gate$)")


def expert_part(experts: str, expert: int, part: str) -> str:
    """The module that is one projection of one expert; ``experts`` is the module of all."""
    return f"{experts}.{expert}.{part}"


def holder_of(part: str) -> str:
    """The module of all experts in which an ``expert_part`` is."""
    return part.rsplit(".", 2)[0]


def parts_in(leaf: str) -> tuple[str, ...]:
    """The projections of every expert that ``experts.<leaf>`` holds; none for any other name."""
    return _STACKED.get(leaf, ())


def other_spellings(name: str) -> Iterator[str]:
    """Further names by which adapters may know a module in a mixture, its router or its experts."""
    inside = _INSIDE.fullmatch(name)
    leaves = [name]
    if inside is not None:
        leaves.append(f"{inside[1]}.experts.{inside[2]}.{OLD_NAMES[inside[3]]}")
    for leaf in leaves:
        for block in _BLOCKS:
            yield _BLOCK.sub(f".{block}.", leaf)
