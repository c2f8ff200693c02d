"""Where the weights of an adapter stand in its block, module by module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loramux.ops.layout import NO_GAIN, OFFSET_A, OFFSET_B, OFFSET_G, RANK, RECORD


class Placement(NamedTuple):
    """One module's: its row in the slot tables, then what its record there says in a block that
    starts at 0. Offsets count in units of ALIGN_BYTES."""

    module: int
    offset_a: int
    offset_b: int
    offset_g: int
    """NO_GAIN without DoRA."""
    rank: int


@dataclass(frozen=True, eq=False)
class Placements:
    """Those of all modules of an adapter, each module once.

    Arrays, because an adapter on experts has tens of thousands of modules.
    """

    modules: np.ndarray
    """Rows of the slot tables, int64 ``[n]``."""
    records: np.ndarray
    """Int64 ``[n, RECORD]``, see ``ops/layout.py``."""

    @staticmethod
    def of(placements: Iterable[Placement]) -> Placements:
        rows = np.array(list(placements), dtype=np.int64).reshape(-1, 1 + RECORD)
        return Placements(rows[:, 0], rows[:, 1:])

    @property
    def max_rank(self) -> int:
        return int(self.records[:, RANK].max(initial=0))

    @property
    def has_gain(self) -> bool:
        """Whether there is DoRA anywhere."""
        return bool((self.records[:, OFFSET_G] != NO_GAIN).any())

    def any_in(self, modules: range) -> bool:
        """Whether any of these rows of the tables is among them."""
        return bool(((self.modules >= modules.start) & (self.modules < modules.stop)).any())

    def records_from(self, start: int) -> np.ndarray:
        """The records where the block starts at unit ``start`` of the arena."""
        records = self.records.copy()
        records[:, [OFFSET_A, OFFSET_B]] += start
        records[records[:, OFFSET_G] != NO_GAIN, OFFSET_G] += start
        return records
