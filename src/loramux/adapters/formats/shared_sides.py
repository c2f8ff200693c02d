"""A's or B's that all experts of a projection have in common (shared-outer LoRA).

Files may hold one for each expert all the same. They are told by their bits, and then exist once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loramux.adapters.experts import inside, parts_in
from loramux.adapters.formats.shared_layout import LAYOUT_FILE, SharedSides, Side
from loramux.adapters.report import Report
from loramux.adapters.spec import ModuleDelta


def find_shared(
    deltas: Sequence[ModuleDelta],
    tensors: Mapping[str, Tensor],
    said: SharedSides,
    report: Report,
) -> tuple[ModuleDelta, ...]:
    """The same deltas, where experts with equal A's or B's all name the first one's.

    What is ``said`` to be shared and is not goes to the report.
    """
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, delta in enumerate(deltas):
        place = inside(delta.module)
        if place is not None and len(parts := parts_in(place.leaf)) == 1:
            places[place.experts, parts[0]].append(i)
    found = list(deltas)
    for (experts, part), here in places.items():
        for side in ("A", "B"):
            first, *others = dict.fromkeys(_tensor(deltas[i], side) for i in here)
            if all(_same_bits(tensors[first], tensors[other]) for other in others):
                for i in here:
                    found[i] = _with_tensor(found[i], side, first)
            elif said.get(part) == side:
                report.refuse(
                    f"{LAYOUT_FILE}: experts are said to have one {side} of {part}, "
                    "and have different ones",
                    experts,
                )
    return tuple(found)


def _tensor(delta: ModuleDelta, side: Side) -> str:
    return delta.a if side == "A" else delta.b


def _with_tensor(delta: ModuleDelta, side: Side, name: str) -> ModuleDelta:
    return replace(delta, a=name) if side == "A" else replace(delta, b=name)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*raw)
