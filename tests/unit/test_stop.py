"""Ends of completions, by token and by text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.scheduling.stop import Finish, StopText, StopTokens
from loramux.types import SamplingParams

EOS = 3


def stop_tokens(
    prompt: int = 10, max_model_len: int = 100, eos: tuple[int, ...] = (EOS,), **params: Any
) -> StopTokens:
    return StopTokens(
        SamplingParams(**params),
        eos_token_ids=eos,
        num_prompt_tokens=prompt,
        max_model_len=max_model_len,
    )


def test_an_ordinary_token_ends_nothing() -> None:
    assert stop_tokens().check(50, 1) is None


@pytest.mark.parametrize("token", [3, 4])
def test_each_eos_token_stops_without_a_stop_reason(token: int) -> None:
    assert stop_tokens(eos=(3, 4)).check(token, 1) == Finish("stop")


def test_a_stop_token_is_its_own_stop_reason() -> None:
    assert stop_tokens(stop_token_ids=(7, 8)).check(8, 1) == Finish("stop", 8)


def test_ignored_eos_ends_nothing() -> None:
    assert stop_tokens(ignore_eos=True).check(EOS, 1) is None


def test_eos_asked_for_as_stop_token_stops_though_eos_is_ignored() -> None:
    stops = stop_tokens(ignore_eos=True, stop_token_ids=(EOS,))
    assert stops.check(EOS, 1) == Finish("stop", EOS)


def test_the_last_of_max_tokens_ends_for_length() -> None:
    stops = stop_tokens(max_tokens=5)
    assert [stops.check(50, n) for n in (4, 5)] == [None, Finish("length")]


def test_eos_as_the_last_of_max_tokens_is_a_stop() -> None:
    assert stop_tokens(max_tokens=5).check(EOS, 5) == Finish("stop")


@pytest.mark.parametrize("max_tokens", [None, 50])
def test_a_full_context_ends_for_length(max_tokens: int | None) -> None:
    stops = stop_tokens(prompt=90, max_model_len=100, max_tokens=max_tokens)
    assert [stops.check(50, n) for n in (9, 10)] == [None, Finish("length")]


def test_ends_are_forbidden_until_min_tokens_and_not_longer() -> None:
    stops = stop_tokens(min_tokens=2, stop_token_ids=(7,))
    assert [stops.forbidden_tokens(n) for n in range(4)] == [(3, 7), (3, 7), (), ()]


def test_ignored_eos_is_not_forbidden() -> None:
    stops = stop_tokens(min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert stops.forbidden_tokens(0) == (7,)


def test_nothing_is_forbidden_without_min_tokens() -> None:
    assert stop_tokens().forbidden_tokens(0) == ()


def test_no_token_stops_within_min_tokens() -> None:
    stops = stop_tokens(min_tokens=2)
    assert [stops.check(EOS, n) for n in (1, 2, 3)] == [None, None, Finish("stop")]


def test_a_full_context_ends_within_min_tokens() -> None:
    stops = stop_tokens(prompt=98, max_model_len=100, min_tokens=50)
    assert stops.check(EOS, 2) == Finish("length")


def test_text_passes_at_once_without_stop_strings() -> None:
    assert StopText(()).push("anything") == ("anything", None)


def test_text_that_cannot_begin_a_stop_string_passes_at_once() -> None:
    assert StopText(("END",)).push("the e") == ("the e", None)


def test_a_stop_string_cut_into_pieces_is_found() -> None:
    text = StopText(("END",))
    assert [text.push(piece) for piece in ("so E", "N", "D of")] == [
        ("so ", None),
        ("", None),
        ("", "END"),
    ]


def test_held_text_is_shown_when_it_turns_out_harmless() -> None:
    text = StopText(("END",))
    assert [text.push("so EN"), text.push("C")] == [("so ", None), ("ENC", None)]


def test_held_text_is_shown_at_the_end() -> None:
    text = StopText(("END",))
    text.push("so EN")
    assert text.finish() == "EN"
    assert text.finish() == ""


def test_the_stop_string_can_be_included() -> None:
    text = StopText(("END",), include_stop=True)
    assert [text.push("so EN"), text.push("D of")] == [("so ", None), ("END", "END")]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert StopText(("b", "abc")).push("xabc") == ("xa", "b")


def test_of_stop_strings_that_end_together_the_longest_wins() -> None:
    assert StopText(("b", "ab")).push("xab") == ("x", "ab")


def test_nothing_after_a_stop_string_is_shown() -> None:
    assert StopText(("\n",)).push("one\ntwo\n") == ("one", "\n")


def test_a_stop_string_within_min_tokens_is_ordinary_text() -> None:
    text = StopText(("END", "N"))
    assert text.push("so EN", may_stop=False) == ("so ", None)
    assert text.push("!") == ("EN!", None)


def test_a_stop_string_that_ends_after_min_tokens_counts_whole() -> None:
    text = StopText(("END",))
    assert text.push("so EN", may_stop=False) == ("so ", None)
    assert text.push("D") == ("", "END")


letters = st.text("ab", max_size=12)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stop: list[str]) -> tuple[int, str] | None:
    """End and name of the first stop string, by trying each end in turn."""
    for end in range(len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            return end, max(done, key=len)
    return None


@given(st.lists(letters, max_size=6), stop_strings, st.booleans())
def test_pieces_show_the_text_up_to_the_first_stop_string(
    pieces: list[str], stop: list[str], include: bool
) -> None:
    stops = StopText(stop, include_stop=include)
    shown, found = "", None
    for piece in pieces:
        released, found = stops.push(piece)
        shown += released
        if found is not None:
            break
    shown += stops.finish()
    whole = "".join(pieces)
    expected = first_stop(whole, stop)
    if expected is None:
        assert (shown, found) == (whole, None)
    else:
        end, name = expected
        assert (shown, found) == (whole[: end if include else end - len(name)], name)


@given(st.lists(letters, max_size=6), stop_strings)
def test_only_the_beginning_of_a_stop_string_is_held_back(
    pieces: list[str], stop: list[str]
) -> None:
    stops = StopText(stop)
    pushed = shown = ""
    for piece in pieces:
        released, found = stops.push(piece)
        if found is not None:
            return
        pushed, shown = pushed + piece, shown + released
        held = pushed[len(shown) :]
        assert len(held) <= max(map(len, stop)) - 1
        assert not held or any(s.startswith(held) for s in stop)


@given(st.lists(letters, max_size=6), stop_strings)
def test_nothing_stops_or_is_lost_while_stops_may_not_act(
    pieces: list[str], stop: list[str]
) -> None:
    stops = StopText(stop)
    shown = [stops.push(piece, may_stop=False) for piece in pieces]
    assert all(found is None for _, found in shown)
    assert "".join(text for text, _ in shown) + stops.finish() == "".join(pieces)
