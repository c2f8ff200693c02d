"""The reader of JSON against Python's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.server.tools.json_text import read_value
from loramux.server.tools.reader import NoCall, Reader

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=10,
)
tokens = st.sampled_from(
    ["{", "}", "[", "]", ",", ":", '"', '"a"', "\\", "u00e9", "0", "-", "1", ".", "e", "+", "E5",
     "true", "null", "nul", " ", "\n", "\x00", "\xa0", "NaN", "é"]
)  # fmt: skip


def is_json(text: str) -> bool:
    """Whether the reader takes all of an object with ``text`` as its field."""
    reader = Reader(())
    reading = read_value(reader)
    reader.feed(f'{{"x":{text}}}')
    reader.end()
    try:
        next(reading, None)
    except NoCall:
        return False
    return reader.since(0) == f'{{"x":{text}}}'


def truly_is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is Python's alone")

    try:
        json.loads(f'{{"x":{text}}}', parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(value=values, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_all_json_is_read_to_its_end(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert is_json(json.dumps(value, indent=indent, ensure_ascii=ascii_only))


@given(st.lists(tokens, max_size=8).map("".join))
def test_the_reader_agrees_with_python(text: str) -> None:
    assert is_json(text) == truly_is_json(text)


@pytest.mark.parametrize("text", ['"\\uD83D"', '"\x7f"', "-0", "1E+10", "[[], {}]", '{"": ""}'])
def test_rare_forms_are_json(text: str) -> None:
    assert is_json(text)
    assert truly_is_json(text)


@pytest.mark.parametrize(
    "text",
    ["", "01", "+1", ".5", "1.", "1e", "--1", "'a'", '"\t"', '"\\x"', '"\\u12g4"', "[1,]", "{a:1}",
     '{"a"}', "tRue", "NaN", "Infinity", "1 2"],
)  # fmt: skip
def test_what_only_looks_like_json_is_not_read(text: str) -> None:
    assert not is_json(text)
    assert not truly_is_json(text)
