"""How tokens, stop tokens and stop strings together make and end a completion."""

from __future__ import annotations

from typing import Any

from loramux.engine.completion import CompletionText
from loramux.scheduling.stop import Finish, StopText, StopTokens
from loramux.types import SamplingParams

EOS = 0


class Letters:
    """A detokenizer for tests: token 1 is "a", 2 is "b", …; every 27 waits for the next token."""

    def __init__(self) -> None:
        self._waiting = ""

    def push(self, token_id: int) -> str:
        if token_id == 27:
            self._waiting += "?"
            return ""
        return self.finish() + chr(96 + token_id)

    def finish(self) -> str:
        waiting, self._waiting = self._waiting, ""
        return waiting


def completion(**options: Any) -> CompletionText:
    params = SamplingParams(**options)
    return CompletionText(
        StopTokens(params, eos_token_ids={EOS}, num_prompt_tokens=1, max_model_len=100),
        StopText(params.stop, include_stop=params.include_stop_str_in_output),
        Letters(),
    )


def test_each_token_shows_its_text() -> None:
    text = completion()
    assert [text.push(1), text.push(2)] == [("a", None), ("b", None)]


def test_the_text_of_eos_is_not_shown() -> None:
    text = completion()
    text.push(1)
    assert text.push(EOS) == ("", Finish("stop"))


def test_eos_brings_out_what_was_held_back() -> None:
    text = completion(stop="abc")
    assert [text.push(1), text.push(27), text.push(EOS)] == [
        ("", None),
        ("", None),
        ("a?", Finish("stop")),
    ]


def test_the_last_of_max_tokens_shows_its_text_and_what_was_held_back() -> None:
    text = completion(max_tokens=3, stop="abx")
    assert [text.push(1), text.push(2), text.push(27)] == [
        ("", None),
        ("", None),
        ("ab?", Finish("length")),
    ]


def test_a_stop_string_completed_by_the_last_token_is_the_reason() -> None:
    text = completion(max_tokens=2, stop="ab")
    assert [text.push(1), text.push(2)] == [("", None), ("", Finish("stop", "ab"))]


def test_a_stop_string_within_min_tokens_does_not_end() -> None:
    text = completion(min_tokens=2, stop="a")
    assert [text.push(1), text.push(1), text.push(1)] == [
        ("a", None),
        ("a", None),
        ("", Finish("stop", "a")),
    ]


def test_an_abort_brings_out_what_was_held_back() -> None:
    text = completion(stop="abc")
    text.push(1)
    assert text.finish() == "a"
