"""Show the demo's answers while they arrive: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from loramux.demo.answers import Answer, Grid, Summary
from loramux.demo.run import answer_all
from loramux.demo.table import MIN_COLUMN, column_width, render
from loramux.engine.interface import Engine

_REFRESH_SECONDS = 0.1


@dataclass(frozen=True)
class Screen:
    """Where the answers go. Not ``live``: no cursor movement, one line for each answer."""

    console: Console
    live: bool

    @classmethod
    def of_stdout(cls, *, plain: bool) -> Screen:
        # rich calls a pipe a terminal when FORCE_COLOR is set; a table that moves the cursor is
        # of no use there.
        console = Console()
        live = not plain and console.is_interactive and sys.stdout.isatty()
        return cls(console=console, live=live)

    def busy(self, text: str) -> AbstractContextManager[object]:
        return self.console.status(text) if self.live else contextlib.nullcontext()


async def show_answers(engine: Engine, grid: Grid, screen: Screen, *, max_tokens: int) -> Summary:
    """Run all requests of ``grid`` and show them; the last view of the table is not cropped."""
    if not screen.live or column_width(grid, screen.console.width) < MIN_COLUMN:
        return await answer_all(engine, grid, max_tokens=max_tokens, on_finish=_print_line)
    with Live(console=screen.console, auto_refresh=False, transient=True) as live:
        redraw = asyncio.create_task(_redraw(live, grid))
        try:
            summary = await answer_all(engine, grid, max_tokens=max_tokens, on_finish=_ignore)
        finally:
            redraw.cancel()
    screen.console.print(render(grid, screen.console, crop=False))
    return summary


async def _redraw(live: Live, grid: Grid) -> None:
    # By the clock and not by the token: 21 streams would redraw hundreds of times a second.
    while True:
        live.update(render(grid, live.console, crop=True), refresh=True)
        await asyncio.sleep(_REFRESH_SECONDS)


def _print_line(answer: Answer) -> None:
    print(answer.line, flush=True)


def _ignore(_: Answer) -> None:
    """The table is redrawn by the clock."""
