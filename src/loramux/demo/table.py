"""The demo's answers as a table that fits the terminal."""

from __future__ import annotations

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from loramux.demo.answers import Answer, Grid, one_line

MIN_COLUMN = 14
"""Cells; narrower answers cannot be read."""

_HEADER_LINES = 4
_GAP = 2
"""Cells between columns: one of padding and one that the box draws as a blank divider."""


def column_width(grid: Grid, width: int) -> int:
    """Cells for each prompt's column on a terminal ``width`` cells wide; may be too few to read."""
    return (width - _name_width(grid)) // len(grid.prompts) - _GAP


def render(grid: Grid, console: Console, *, crop: bool) -> RenderableType:
    """The table. ``crop`` keeps it within the terminal's height, as a live view must."""
    width = max(column_width(grid, console.width), 1)
    lines = max((console.height - _HEADER_LINES) // len(grid.rows), 1) if crop else None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", width=_name_width(grid) - _GAP, style="bold cyan", no_wrap=True)
    for prompt in grid.prompts:
        header = _cropped(Text(one_line(prompt)), console, width=width, lines=2)
        table.add_column(header, width=width, overflow="fold")
    for row in grid.rows:
        cells = (_cropped(_text(answer), console, width=width, lines=lines) for answer in row)
        table.add_row(Text(row[0].row), *cells)
    return table


def _name_width(grid: Grid) -> int:
    return max(cell_len(row[0].row) for row in grid.rows) + _GAP


def _text(answer: Answer) -> Text:
    if answer.error is not None:
        return Text(answer.shown, style="red")
    return Text(answer.shown, style="" if answer.finished else "dim")


def _cropped(text: Text, console: Console, *, width: int, lines: int | None) -> Text:
    """``text`` if it wraps to at most ``lines`` lines, else that many lines that end with ``…``."""
    wrapped = text.wrap(console, width)
    if lines is None or len(wrapped) <= lines:
        return text
    kept = wrapped[:lines]
    kept[-1].append("…")
    kept[-1].truncate(width, overflow="ellipsis")
    return Text("\n").join(kept)
