"""Who sits in which row of a step: the axis along which LoRA ops are tested and measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from loramux.types import Slot

Order = Literal["sorted", "interleaved"]

ORDERS: tuple[Order, ...] = ("sorted", "interleaved")

Draw = Callable[[random.Random, int, int], list[int]]


def _zipf(rng: random.Random, num_rows: int, num_slots: int) -> list[int]:
    return rng.choices(range(num_slots), [1 / (1 + i) ** 1.5 for i in range(num_slots)], k=num_rows)


_DRAWS: dict[str, Draw] = {
    "identical": lambda rng, rows, slots: [rng.randrange(slots)] * rows,
    "distinct": lambda rng, rows, slots: [i % slots for i in range(rows)],
    "uniform": lambda rng, rows, slots: rng.choices(range(slots), k=rows),
    "zipf": _zipf,
    "base_only": lambda rng, rows, slots: [slots] * rows,
    "mixed": lambda rng, rows, slots: [
        slot if i % 2 else slots for i, slot in enumerate(rng.choices(range(slots), k=rows))
    ],
}

POPULARITIES = tuple(_DRAWS)


def draw_slots(
    popularity: str, *, num_rows: int, num_slots: int, order: Order, seed: int = 0
) -> list[Slot]:
    """The slot of each row; ``num_slots`` is the base model's.

    ``distinct`` gives every row its own adapter as long as there are enough; ``mixed`` leaves every
    other row to the base. ``interleaved`` rows stand in an order that is never the sorted one,
    unless all are alike.
    """
    rng = random.Random(f"{popularity} {seed}")
    slots = sorted(_DRAWS[popularity](rng, num_rows, num_slots))
    if order == "interleaved":
        slots = slots[1::2] + slots[::2][::-1]
    return [Slot(slot) for slot in slots]
