"""The block tables of a step as flat arrays, as kernels of paged attention read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loramux.ops.attention import AttentionSequence


@dataclass(frozen=True)
class Pages:
    """All sequences of a step, one behind the other; int32, on the host."""

    block_size: int
    num_cached: np.ndarray
    """``[sequences]``: tokens of each that are in the cache already."""
    row_start: np.ndarray
    """``[sequences + 1]``: first row of each sequence."""
    block_start: np.ndarray
    """``[sequences + 1]``: first entry of each sequence in ``blocks``."""
    blocks: np.ndarray
    last_block_tokens: np.ndarray

    @staticmethod
    def of(sequences: Sequence[AttentionSequence], block_size: int) -> Pages:
        num_cached = np.array([s.num_cached for s in sequences], dtype=np.int32)
        num_tokens = np.array([s.num_tokens for s in sequences], dtype=np.int32)
        lengths = num_cached + num_tokens
        counts = -(-lengths // block_size)
        # An array's numbers are taken where they stand: a step may have hundreds of thousands.
        tables = [np.asarray(s.block_table, dtype=np.int32) for s in sequences]
        used = [table[:count] for table, count in zip(tables, counts.tolist(), strict=True)]
        return Pages(
            block_size,
            num_cached,
            row_start=_starts(num_tokens),
            block_start=_starts(counts),
            blocks=np.concatenate(used) if used else np.zeros(0, dtype=np.int32),
            last_block_tokens=(lengths - 1) % block_size + 1,
        )

    def new_rows(self) -> np.ndarray:
        """Place of each new token, ``block * block size + place in it``: int64 ``[rows]``."""
        counts = np.diff(self.row_start)
        within = np.arange(self.row_start[-1]) - np.repeat(self.row_start[:-1], counts)
        position = np.repeat(self.num_cached, counts) + within
        entry = np.repeat(self.block_start[:-1], counts) + position // self.block_size
        # A large cache has more rows than 32 bits can count.
        block = self.blocks[entry].astype(np.int64)
        return block * self.block_size + position % self.block_size

    def padded(self, num_sequences: int) -> Pages:
        """The same with sequences behind that have neither rows nor blocks."""
        missing = num_sequences - len(self.last_block_tokens)
        return Pages(
            self.block_size,
            np.pad(self.num_cached, (0, missing)),
            np.pad(self.row_start, (0, missing), mode="edge"),
            np.pad(self.block_start, (0, missing), mode="edge"),
            self.blocks,
            np.pad(self.last_block_tokens, (0, missing)),
        )


def _starts(counts: np.ndarray) -> np.ndarray:
    """Prefix sums, one longer than the counts."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
