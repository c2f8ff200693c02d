"""What the demo keeps of the deltas and says at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loramux.demo.answers import Answer, Grid, Summary, one_line, summarise
from loramux.types import Delta, FinishReason, RequestId
from tests.unit.scripted_engine import stats


def delta(text: str, finish_reason: FinishReason | None = None, error: str | None = None) -> Delta:
    return Delta(RequestId("r"), 0, text, (1, 2), finish_reason=finish_reason, error=error)


GOOD = Summary(
    num_requests=21,
    num_failed=0,
    num_adapters=6,
    step_adapters=6,
    num_tokens=300,
    seconds=2.5,
    slots_used=6,
    slots_total=8,
    adapter_bytes=26_891_816,
)


def test_deltas_add_up_to_the_answer() -> None:
    answer = Answer("pirate", "Who are you?")
    answer.add(delta("Arr, "))
    answer.add(delta("matey!", "stop"))
    assert (answer.text, answer.num_tokens, answer.finished) == ("Arr, matey!", 4, True)
    assert answer.error is None


def test_line_names_the_adapter_the_prompt_and_the_answer() -> None:
    answer = Answer("pirate", "Who are\nyou?", text="Arr,\nmatey!\n")
    assert answer.line == "[pirate] Who are you? -> Arr, matey!"


def test_line_without_an_adapter_names_the_base() -> None:
    assert Answer(None, "Hi", text="Hello").line == "[base] Hi -> Hello"


def test_error_is_shown_in_place_of_the_text() -> None:
    answer = Answer("pirate", "Hi")
    answer.add(delta("Arr", "error", "the logits are not finite"))
    assert answer.line == "[pirate] Hi -> error: the logits are not finite"


def test_aborted_answer_counts_as_failed() -> None:
    answer = Answer("pirate", "Hi")
    answer.add(delta("", "abort"))
    assert answer.error == "the request ended with 'abort'"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("  a \n\n b\tc ", "a b c"),
        ("\x1b[31mred\x07", "[31mred"),
        ("👩\u200d🚀 ¡sí!", "👩\u200d🚀 ¡sí!"),
        ("", ""),
    ],
)
def test_one_line_keeps_text_and_drops_control_characters(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_grid_has_a_row_for_the_base_and_each_adapter_and_a_column_for_each_prompt() -> None:
    grid = Grid(adapters=("emoji", "json"), prompts=("one", "two"))
    assert [[(a.row, a.prompt) for a in row] for row in grid.rows] == [
        [("base", "one"), ("base", "two")],
        [("emoji", "one"), ("emoji", "two")],
        [("json", "one"), ("json", "two")],
    ]


def test_summary_line_holds_all_the_numbers() -> None:
    assert GOOD.line == (
        "21 requests | adapters in the same step: 6 + base | 120.0 tokens/s | "
        "slots used: 6 of 8 | adapter weights: 26.9 MB"
    )


def test_run_is_good_when_all_finished_and_one_step_held_all_adapters() -> None:
    assert GOOD.ok


def test_run_with_a_failed_request_is_not_good_and_says_so() -> None:
    bad = replace(GOOD, num_failed=2)
    assert not bad.ok
    assert bad.line.startswith("21 requests | 2 failed | ")


def test_run_whose_adapters_never_met_in_a_step_is_not_good_and_says_so() -> None:
    bad = replace(GOOD, step_adapters=5)
    assert not bad.ok
    assert "adapters in the same step: 5 + base" in bad.line
    assert bad.line.endswith("expected 6 adapters in one step")


def test_summary_counts_unfinished_and_failed_answers() -> None:
    grid = Grid(adapters=("json",), prompts=("one", "two"))
    finished, failed, unfinished, other = grid.answers
    finished.add(delta("a", "stop"))
    other.add(delta("b", "length"))
    failed.fail("the context is too short")
    unfinished.add(delta("c"))
    summary = summarise(grid, stats(max_step_adapters=1, slots_used=1, slots_total=8), 2.0)
    assert (summary.num_requests, summary.num_failed, summary.num_tokens) == (4, 2, 6)
    assert (summary.num_adapters, summary.step_adapters) == (1, 1)
