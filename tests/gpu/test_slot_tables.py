"""Slot tables on a GPU: the host waits for no step, and writes over nothing that is being read."""

from __future__ import annotations

import torch

from loramux.lora.placements import Placement, Placements
from loramux.lora.slots import SlotTables
from loramux.ops.layout import NO_GAIN, OFFSET_A
from loramux.types import Slot

LONG = 200_000_000
"""Cycles, a tenth of a second and more."""
MODULES = 20_000
PLACES = Placements.of([Placement(m, 0, 1, NO_GAIN, rank=2) for m in range(MODULES)])


def tables() -> SlotTables:
    """With memory for a column's way already at hand."""
    t = SlotTables(MODULES, num_slots=3, device=torch.device("cuda"))
    t.set(Slot(0), PLACES, start=0)
    t.flush()
    torch.cuda.synchronize()
    return t


def step() -> torch.cuda.Event:
    """A long one; its end."""
    torch.cuda._sleep(LONG)
    end = torch.cuda.Event()
    end.record()
    return end


def test_columns_change_behind_a_running_step_for_which_nobody_waits() -> None:
    t = tables()
    end = step()
    for slot in (0, 1, 2):
        t.set(Slot(slot), PLACES, start=10 + slot)
        t.flush()
    assert not end.query(), "the host has waited for the step"
    torch.cuda.synchronize()
    assert torch.equal(t.table.cpu(), torch.from_numpy(t.host.copy()))


def test_a_step_sees_the_column_as_it_was_when_the_step_was_launched() -> None:
    t = tables()
    seen: list[torch.Tensor] = []
    for start in (100, 200, 300):
        step()
        t.set(Slot(1), PLACES, start)
        t.flush()
        seen.append(t.table[:, 1, OFFSET_A].clone())
    assert [(s.min().item(), s.max().item()) for s in seen] == [(100, 100), (200, 200), (300, 300)]
