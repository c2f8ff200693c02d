"""Text for terminals and pipes: harmless lines, columns that stand under one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_LONGEST_LINE = 400


def harmless(text: str) -> str:
    """One line that cannot steer a terminal; names from files can stand in a base's name too."""
    kept = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:_LONGEST_LINE])
    return kept + "..." if len(text) > _LONGEST_LINE else kept


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
