"""The placements of an adapter one by one, as tests look at them."""

from __future__ import annotations

from loramux.lora.placements import Placement, Placements


def each_of(placements: Placements) -> list[Placement]:
    pairs = zip(placements.modules.tolist(), placements.records.tolist(), strict=True)
    return [Placement(module, *record) for module, record in pairs]
