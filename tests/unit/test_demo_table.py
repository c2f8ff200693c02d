"""The demo's table fits the terminal, whatever the models write."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from loramux.demo.answers import Grid
from loramux.demo.table import MIN_COLUMN, column_width, render

PROMPTS = ("What is the opposite of hot?", "What is 6 plus 2?", "Is the sky blue?")
ADAPTERS = ("emoji", "json", "pirate", "shout", "spanish", "yesno")


def filled(text: str) -> Grid:
    grid = Grid(ADAPTERS, PROMPTS)
    for answer in grid.answers:
        answer.text = text
        answer.finished = True
    return grid


def drawn(grid: Grid, *, width: int = 80, height: int = 24, crop: bool) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(render(grid, console, crop=crop))
    return capture.get().rstrip("\n").split("\n")


@pytest.mark.parametrize("text", ["", "word " * 60, "x" * 300, "🌟🎉" * 80, "¡Claro que sí! " * 20])
@pytest.mark.parametrize("width", [60, 80, 133])
def test_live_table_stays_within_the_terminal(text: str, width: int) -> None:
    lines = drawn(filled(text), width=width, crop=True)
    assert len(lines) < 24
    assert max(cell_len(line) for line in lines) <= width


def test_last_table_holds_every_word() -> None:
    text = "🌟 " + " ".join(f"word{number}" for number in range(40)) + " 🎉"
    shown = " ".join(drawn(filled(text), crop=False)).split()
    assert all(shown.count(word) == len(ADAPTERS) * 3 + 3 for word in text.split())


def test_cropped_answer_ends_with_an_ellipsis() -> None:
    assert any("…" in line for line in drawn(filled("word " * 60), crop=True))


def test_short_answers_are_not_cropped() -> None:
    assert not any("…" in line for line in drawn(filled('{"answer": "8"}'), crop=True))


def test_markup_in_an_answer_is_shown_as_it_is() -> None:
    assert any("[bold]8[/bold]" in line for line in drawn(filled("[bold]8[/bold]"), crop=False))


def test_each_row_begins_with_its_name() -> None:
    firsts = [line.split()[0] for line in drawn(filled("ok"), crop=True)[-7:]]
    assert firsts == ["base", *ADAPTERS]


def test_three_prompts_fit_80_columns() -> None:
    assert column_width(Grid(ADAPTERS, PROMPTS), 80) >= MIN_COLUMN


def test_ten_prompts_do_not_fit_80_columns() -> None:
    assert column_width(Grid(ADAPTERS, ("one",) * 10), 80) < MIN_COLUMN
