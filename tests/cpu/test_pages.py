"""A step's block tables as flat arrays, against the tables themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loramux.ops.attention import AttentionSequence
from loramux.ops.pages import Pages

BLOCK = 4


@st.composite
def steps(draw: st.DrawFn) -> list[AttentionSequence]:
    sequences: list[AttentionSequence] = []
    row = 0
    for _ in range(draw(st.integers(1, 5))):
        num_tokens, num_cached = draw(st.integers(1, 9)), draw(st.integers(0, 9))
        most = 2**31 // BLOCK
        needed = -(-(num_tokens + num_cached) // BLOCK)
        # Tables may be longer than what a step needs of them.
        table = draw(st.lists(st.integers(0, most), min_size=needed, max_size=needed + 2))
        sequences.append(AttentionSequence(row, num_tokens, num_cached, tuple(table)))
        row += num_tokens
    return sequences


@given(steps())
def test_flat_arrays_say_what_the_tables_say(sequences: list[AttentionSequence]) -> None:
    pages = Pages.of(sequences, BLOCK)
    rows = pages.new_rows()
    assert rows.dtype == np.int64
    assert pages.row_start.tolist() == [s.first_row for s in sequences] + [len(rows)]
    for i, s in enumerate(sequences):
        length = s.num_cached + s.num_tokens
        blocks = pages.blocks[pages.block_start[i] : pages.block_start[i + 1]].tolist()
        assert blocks == list(s.block_table[: -(-length // BLOCK)])
        assert (len(blocks) - 1) * BLOCK + pages.last_block_tokens[i] == length
        assert rows[s.first_row : s.first_row + s.num_tokens].tolist() == [
            s.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in range(s.num_cached, length)
        ]


@given(steps(), st.integers(0, 4))
def test_padding_has_neither_rows_nor_blocks(
    sequences: list[AttentionSequence], extra: int
) -> None:
    pages = Pages.of(sequences, BLOCK)
    padded = pages.padded(len(sequences) + extra)
    assert padded.new_rows().tolist() == pages.new_rows().tolist()
    for name in ("row_start", "block_start"):
        starts = getattr(padded, name)
        assert starts[: len(sequences) + 1].tolist() == getattr(pages, name).tolist()
        assert np.diff(starts)[len(sequences) :].tolist() == [0] * extra
    assert padded.last_block_tokens[len(sequences) :].tolist() == [0] * extra
