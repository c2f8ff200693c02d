"""The demo submits everything at once and survives single failures."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from loramux.demo.answers import Answer, Grid, Summary
from loramux.demo.run import answer_all
from loramux.demo.show import Screen, show_answers
from loramux.types import Delta
from tests.unit.scripted_engine import ScriptedEngine

SCRIPT = {None: ["It is ", "cold."], "shout": ["COLD."], "pirate": ["Arr, ", "matey! ", "Cold."]}


def new_grid() -> Grid:
    return Grid(adapters=("pirate", "shout"), prompts=("hot?", "big?"))


def run(engine: ScriptedEngine, grid: Grid) -> tuple[Summary, list[Answer]]:
    finished: list[Answer] = []
    summary = asyncio.run(answer_all(engine, grid, max_tokens=9, on_finish=finished.append))
    return summary, finished


def test_every_model_answers_every_prompt() -> None:
    summary, finished = run(ScriptedEngine(SCRIPT, max_step_adapters=2), new_grid())
    assert sorted(answer.line for answer in finished) == [
        "[base] big? -> It is cold.",
        "[base] hot? -> It is cold.",
        "[pirate] big? -> Arr, matey! Cold.",
        "[pirate] hot? -> Arr, matey! Cold.",
        "[shout] big? -> COLD.",
        "[shout] hot? -> COLD.",
    ]
    assert summary.ok
    assert summary.num_tokens == 12


def test_requests_are_greedy_chats_of_the_asked_length() -> None:
    engine = ScriptedEngine(SCRIPT)
    run(engine, new_grid())
    assert [request.model for request in engine.requests] == [
        None, None, "pirate", "pirate", "shout", "shout",
    ]  # fmt: skip
    assert all(r.params.greedy and r.params.max_tokens == 9 for r in engine.requests)
    assert bytes(engine.requests[0].prompt_token_ids) == b"hot?"


def test_all_requests_are_submitted_before_the_first_answer_is_read() -> None:
    waiting: list[int] = []

    class Counting(ScriptedEngine):
        async def _stream(self, model: str | None) -> AsyncIterator[Delta]:
            waiting.append(len(self.requests))
            async for delta in super()._stream(model):
                yield delta

    run(Counting(SCRIPT), new_grid())
    assert waiting == [6] * 6


def test_refused_request_leaves_the_others_alone() -> None:
    script = {model: pieces for model, pieces in SCRIPT.items() if model != "shout"}
    summary, finished = run(ScriptedEngine(script, max_step_adapters=2), new_grid())
    assert len(finished) == 6
    assert summary.num_failed == 2
    assert not summary.ok


def test_engine_that_dies_marks_the_answers_it_owed() -> None:
    engine = ScriptedEngine(SCRIPT, max_step_adapters=2, dies=frozenset({"pirate"}))
    summary, finished = run(engine, new_grid())
    assert summary.num_failed == 2
    assert "[pirate] hot? -> error: the engine has failed: out of memory" in [
        answer.line for answer in finished
    ]


def test_plain_screen_gets_a_line_for_each_answer(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(console=Console(file=io.StringIO()), live=False)
    engine = ScriptedEngine(SCRIPT, max_step_adapters=2)
    asyncio.run(show_answers(engine, new_grid(), screen, max_tokens=9))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert "[shout] hot? -> COLD." in lines


def test_live_screen_ends_with_the_whole_table() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True, color_system=None)
    engine = ScriptedEngine(SCRIPT, max_step_adapters=2)
    asyncio.run(show_answers(engine, new_grid(), Screen(console, live=True), max_tokens=9))
    last = out.getvalue().splitlines()[-5:]
    assert [line.split()[0] for line in last[-3:]] == ["base", "pirate", "shout"]
    assert "Arr, matey! Cold." in last[-2]
