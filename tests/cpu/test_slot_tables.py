"""The slot tables: what a column says, when the device sees it, and that addresses stay."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from loramux.lora.placements import Placement, Placements
from loramux.lora.slots import SlotTables
from loramux.ops.layout import NO_GAIN, OFFSET_A, OFFSET_B, OFFSET_G, RANK
from loramux.types import Slot

FIELDS = {"offset_a": OFFSET_A, "offset_b": OFFSET_B, "offset_g": OFFSET_G, "rank": RANK}

PLAIN = Placement(module=0, offset_a=0, offset_b=10, offset_g=NO_GAIN, rank=4)
DORA = Placement(module=2, offset_a=30, offset_b=40, offset_g=50, rank=9)
PLACES = Placements.of([PLAIN, DORA])


def tables() -> SlotTables:
    return SlotTables(num_modules=3, num_slots=2, device=torch.device("cpu"))


def column(of: SlotTables, slot: int) -> dict[str, list[int]]:
    return {name: of.table[:, slot, place].tolist() for name, place in FIELDS.items()}


EMPTY = {name: [0, 0, 0] for name in FIELDS}


def test_a_column_holds_ranks_and_offsets_from_the_start_of_its_block() -> None:
    t = tables()
    t.set(Slot(1), PLACES, start=100)
    t.flush()
    assert column(t, 1) == {
        "offset_a": [100, 0, 130],
        "offset_b": [110, 0, 140],
        "offset_g": [0, 0, 150],
        "rank": [4, 0, 9],
    }
    assert column(t, 0) == EMPTY


def test_nothing_of_an_earlier_adapter_is_left_in_a_column() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=100)
    t.set(Slot(0), Placements.of([PLAIN]), start=7)
    t.flush()
    assert column(t, 0)["rank"] == [4, 0, 0]
    assert column(t, 0)["offset_a"] == [7, 0, 0]
    assert column(t, 0)["offset_g"] == [0, 0, 0]


def test_a_cleared_column_is_that_of_the_base_model() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=100)
    t.clear(Slot(0))
    t.flush()
    assert column(t, 0) == column(t, 2) == EMPTY


def test_the_base_models_column_cannot_be_written() -> None:
    with pytest.raises(AssertionError, match="base model's column is fixed"):
        tables().set(Slot(2), PLACES, start=0)


def test_the_device_sees_changes_at_flush_and_not_before() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=100)
    assert column(t, 0) == EMPTY
    t.flush()
    assert column(t, 0)["rank"] == [4, 0, 9]


def test_host_and_device_agree_after_flush() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=100)
    t.set(Slot(1), PLACES, start=200)
    t.clear(Slot(0))
    t.flush()
    assert np.array_equal(t.table.numpy(), t.host)


def test_a_flush_leaves_columns_alone_that_have_not_changed() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=100)
    t.flush()
    t.table[:, 0] = 7
    t.set(Slot(1), PLACES, start=200)
    t.flush()
    assert t.table[:, 0].eq(7).all()
    assert column(t, 1)["rank"] == [4, 0, 9]
    t.flush()
    assert t.table[:, 0].eq(7).all()


def test_a_column_of_many_modules_can_be_given_in_any_order() -> None:
    t = SlotTables(num_modules=40, num_slots=1, device=torch.device("cpu"))
    modules = [31, 4, 17, 0, 39]
    places = [Placement(m, 10 * m, 10 * m + 5, NO_GAIN, rank=1 + m) for m in modules]
    t.set(Slot(0), Placements.of(places), start=1000)
    t.flush()
    expected = torch.zeros(40, 4, dtype=torch.int64)
    for m in modules:
        expected[m] = torch.tensor([1000 + 10 * m, 1005 + 10 * m, NO_GAIN, 1 + m])
    assert torch.equal(t.table[:, 0], expected)
    assert t.max_rank == [40, 0]


def test_addresses_never_change() -> None:
    t = tables()
    before = t.table.data_ptr()
    for start in range(5):
        t.set(Slot(start % 2), PLACES, start)
        t.flush()
    assert t.table.data_ptr() == before


def test_offsets_are_64_bit_so_that_none_is_cut_off() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=2**40)
    t.flush()
    assert t.table[0, 0, OFFSET_A].item() == 2**40
    assert t.table.dtype == torch.int64


def test_version_grows_with_every_change_of_a_column_and_of_no_other() -> None:
    t = tables()
    seen = [list(t.version)]
    for change in (lambda: t.set(Slot(0), PLACES, 0), lambda: t.set(Slot(0), PLACES, 5)):
        change()
        seen.append(list(t.version))
    t.clear(Slot(0))
    seen.append(list(t.version))
    assert all(old[0] < new[0] for old, new in pairwise(seen))
    assert all(version[1:] == [0, 0] for version in seen)


def test_a_slot_tells_its_largest_rank_and_whether_it_has_dora() -> None:
    t = tables()
    t.set(Slot(0), PLACES, start=1)
    t.set(Slot(1), Placements.of([PLAIN]), start=9)
    assert (t.max_rank, t.has_gain) == ([9, 4, 0], [True, False, False])
    t.clear(Slot(0))
    assert (t.max_rank, t.has_gain) == ([0, 4, 0], [False, False, False])
