"""How adapter weights stand in the arena; the one layout that packing and kernels share.

For each module, every start a multiple of 16 bytes, padding zero:

    A  [rank, pad(in)]
    B  [out, pad(rank)]     holds scale * B
    g  [pad(out)]           DoRA gain m / ||W + scale B A|| per output row; only with DoRA

Ranks are the adapter's own, module by module. Where they stand is said by the slot tables, whose
record of a module in a slot is four int64: where A, B and g start, and the rank.
"""

from __future__ import annotations

ALIGN_BYTES = 16
"""Offsets count in this unit, so that a kernel's addresses are aligned by construction."""

VECTOR = 8
"""Elements that a kernel loads at once; leading dimensions are multiples of it."""


def pad(size: int) -> int:
    """``size`` rounded up to whole vectors."""
    return -(-size // VECTOR) * VECTOR


OFFSET_A, OFFSET_B, OFFSET_G, RANK = range(4)
"""Places in a record. Offsets count in ALIGN_BYTES; g's is NO_GAIN where there is no DoRA."""
RECORD = 4
NO_GAIN = 0
"""No g can start there, because an adapter's A and B stand before it."""

EXPERT_PARTS = 3
"""Rows of the tables for each expert, one after another: gate, up, down."""
