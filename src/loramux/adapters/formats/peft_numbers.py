"""Ranks and alphas of an adapter's modules as PEFT's configuration says them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

Number = TypeVar("Number", int, float)

_NEAREST = 4
"""How many floats above and below the product are tried."""


def alpha_of(scale: float, rank: int, *, use_rslora: bool) -> float | None:
    """The alpha from which PEFT computes exactly this scale; None where there is none.

    A quotient does not reach every float: no float divided by 3 is 0.1.
    """
    divisor = math.sqrt(rank) if use_rslora else rank
    above = below = scale * divisor
    for _ in range(_NEAREST):
        for alpha in (above, below):
            if math.isfinite(alpha) and alpha / divisor == scale:
                return alpha
        above, below = math.nextafter(above, math.inf), math.nextafter(below, -math.inf)
    return None


def as_pattern(values: Mapping[str, Number]) -> tuple[Number, dict[str, Number]]:
    """A default and a table of what differs, for values by name of module.

    A key is the last word of the names where all modules that have it agree.
    """
    default = Counter(values.values()).most_common(1)[0][0]
    by_leaf: dict[str, dict[str, Number]] = defaultdict(dict)
    for name, value in values.items():
        by_leaf[name.rpartition(".")[2]][name] = value
    table: dict[str, Number] = {}
    for leaf, members in by_leaf.items():
        if len(set(members.values())) == 1:
            members = {leaf: next(iter(members.values()))}
        table |= {_expression(name): value for name, value in members.items() if value != default}
    return default, table


def as_targets(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """``target_modules`` for exactly these modules of a base that has ``others`` as well."""
    adapted = list(names)
    taken = {name.rpartition(".")[2] for name in others} | set(others)
    found = dict.fromkeys(
        leaf if (leaf := name.rpartition(".")[2]) not in taken else name for name in adapted
    )
    return list(found)


def _expression(name: str) -> str:
    return name.replace(".", r"\.")
