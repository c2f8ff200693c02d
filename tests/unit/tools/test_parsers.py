"""Calls in the text of answers, in the styles that models write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loramux.server.tools.forced import read_list
from loramux.server.tools.parser import CallParser, OneCall, PlainText
from loramux.server.tools.reader import Reader, Reading
from loramux.server.tools.styles import STYLES
from tests.unit.tools.parsing import NAMES, Found, cut, events, found, parser_of, piece, start

F = '{"name": "f", "arguments": {"x": 1}}'
G = '{"name": "get-time_2", "arguments": {}}'
PF, PG = F.replace("arguments", "parameters"), G.replace("arguments", "parameters")
BOTH = [("f", '{"x": 1}'), ("get-time_2", "{}")]


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", f"<tool_call>\n{F}\n</tool_call>", Found("", BOTH[:1])),
        (
            "hermes",
            f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
            Found("", BOTH),
        ),
        ("hermes", f"Let me see.\n\n<tool_call>{F}</tool_call>", Found("Let me see.", BOTH[:1])),
        ("hermes", f"<tool_call>{F}</tool_call>\n\nDone.", Found("\n\nDone.", BOTH[:1])),
        ("hermes", f"<tool_call>[{F}, {G}]</tool_call>", Found("", BOTH)),
        ("hermes", f"<tool_call>{F}", Found("", BOTH[:1])),
        ("hermes", f"<tool_call>{F}\n<tool_call>{G}", Found("", BOTH)),
        ("hermes", f"a <tool_call> b <tool_call>{F}", Found("a <tool_call> b", BOTH[:1])),
        ("llama3", PF, Found("", BOTH[:1])),
        ("llama3", f"\n {PF}; {PG}\n", Found("", BOTH)),
        ("llama3", f"<|python_tag|>{PF};{PG}", Found("", BOTH)),
        ("llama3", f"So: <|python_tag|>{PF}<|python_tag|>{PG}", Found("So:", BOTH)),
        (
            "llama3",
            '{"type": "function", "name": "f", "parameters": {"x": 1}, "id": 7}',
            Found("", BOTH[:1]),
        ),
        ("mistral", f"[TOOL_CALLS] [{F}, {G}]", Found("", BOTH)),
        ("mistral", f"Yes.[TOOL_CALLS][{F}]", Found("Yes.", BOTH[:1])),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}', Found("", BOTH[:1])),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]get-time_2[ARGS]{}',
            Found("", BOTH),
        ),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS] {"x": 1}', Found("", BOTH[:1])),
    ],
)
def test_calls_are_found(style: str, text: str, expected: Found) -> None:
    assert found(parser_of(style), [text]) == expected
    assert found(parser_of(style), text) == expected, "character by character"


@pytest.mark.parametrize("order", ["name first", "arguments first"])
def test_arguments_are_what_the_model_has_written(order: str) -> None:
    arguments = '{ "b" :\t[1.50, -0e+1, true, null, {"é": "\\u00E9\\n\\"}"}],\n "a":{ } }'
    fields = ['"name":"f"', f'"arguments": {arguments}']
    if order == "arguments first":
        fields.reverse()
    text = f"<tool_call>{{{' , '.join(fields)}}}</tool_call>"
    assert found(parser_of("hermes"), text) == Found("", [("f", arguments)])


def test_a_call_streams_from_the_beginning_of_its_arguments_on() -> None:
    pieces = ["Hm", ". <", "tool", "_call>\n", '{"name": "f"', ', "arguments": ', '{"x', '": ', "1",
              "}", "}", "\n</tool", "_call>"]  # fmt: skip
    assert events(parser_of("hermes"), pieces) == [
        ["Hm"], ["."], [], [], [], [], [start("f"), piece('{"x')], [piece('": ')], [piece("1")],
        [piece("}")], [], [], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("style", "pieces", "expected"),
    [
        ("hermes", ["a", " b", "\n", "<", "p>"], [["a"], [" b"], [], [], ["\n<p>"], []]),
        ("hermes", ["<tool", "<tool_", "x"], [[], ["<tool"], ["<tool_x"], []]),
        ("hermes", ["a ", " "], [["a"], [], ["  "]]),
        ("llama3", ['{"', "name", '": "', "Bob"], [[], [], [], [], ['{"name": "Bob']]),
        ("llama3", ['{"', "age", '": 3}'], [[], [], ['{"age": 3}'], []]),
        ("llama3", ["It is {", '"name": "f"}'], [["It is {"], ['"name": "f"}'], []]),
        ("mistral", ["[", "1", "]"], [[], ["[1"], ["]"], []]),
    ],
)
def test_text_is_held_only_as_long_as_a_call_may_begin_with_it(
    style: str, pieces: list[str], expected: list[list[str]]
) -> None:
    assert events(parser_of(style), pieces) == expected


@pytest.mark.parametrize(
    "body",
    [
        "hello",
        "",
        "{",
        "[]",
        '{"name": "f"}',
        '{"name": "nobody", "arguments": {}}',
        '{"name": "F", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments" {}}',
        '{"name": "f", "name": "f", "arguments": {}}',
        '{"arguments": {}, "parameters": {}, "name": "f"}',
        '{"arguments": {}, "name": "nobody"}',
        '{"arguments": {"x": 01}, "name": "f"}',
        '{"name": "f", "comment": "x", "arguments": {}}',
        '{"name": "f", ',
        "{'name': 'f', 'arguments': {}}",
    ],
)
@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
def test_what_is_no_call_is_content_to_the_letter(style: str, body: str) -> None:
    if style == "hermes":
        text = f"Well <tool_call>\n{body}\n</tool_call>!"
    else:
        text = f"Well {STYLES[style].markers[0]} {body} !"
    assert found(parser_of(style), text) == Found(text)


@pytest.mark.parametrize(
    ("broken", "arguments", "content"),
    [
        ('{"x": Paris}}</tool_call>', '{"x": ', "Paris}}</tool_call>"),
        ('{"x": 1,}}', '{"x": 1,', "}}"),
        ('{"x": "a\nb"}}', '{"x": "a', '\nb"}}'),
        ('{"x": 1', '{"x": 1', ""),
        ('{"x": 1}', '{"x": 1}', ""),
        ('{"x": 1} and so on', '{"x": 1}', " and so on"),
        ('{"x": 1}, "y": 2}', '{"x": 1}', ', "y": 2}'),
    ],
)
def test_a_call_that_breaks_off_keeps_what_it_has(
    broken: str, arguments: str, content: str
) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {broken}'
    assert found(parser_of("hermes"), [text]) == Found(content, [("f", arguments)])


def test_calls_go_on_after_one_that_breaks_off() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": oh\n<tool_call>{G}</tool_call>'
    assert found(parser_of("hermes"), [text]) == Found("oh", [("f", '{"x": '), BOTH[1]])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", f"a<tool_call>{F}</tool_call><tool_call>{G}</tool_call> b"),
        ("llama3", f"a <|python_tag|>{PF}; {PG} b"),
        ("mistral", f"a[TOOL_CALLS][{F}, {G}] b"),
    ],
)
def test_calls_beyond_the_most_are_left_out(style: str, text: str) -> None:
    assert found(parser_of(style), text).calls == BOTH
    assert found(parser_of(style, max_calls=1), text) == Found("a b", BOTH[:1])


def test_special_tokens_that_mark_calls_are_never_content() -> None:
    hidden = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    text = 'a [ARGS]b [TOOL_CALLS]nobody[ARGS]{} [TOOL_CALLS]f[ARGS]{"x": 1}'
    assert found(parser_of("mistral", hidden=hidden), text) == Found("a b nobody{}", BOTH[:1])


@pytest.mark.parametrize(
    "between", ["", " ", "nobody", "nobody[CALL_ID]x", "f[CALL_ID]", "[1", "f "]
)
def test_a_marker_right_behind_another_is_seen(between: str) -> None:
    """The list of the older form begins as markers do."""
    text = f"[TOOL_CALLS]{between}[TOOL_CALLS]" + '[TOOL_CALLS]f[ARGS]{"x": 1}'
    assert found(parser_of("mistral"), text).calls == BOTH[:1]
    hidden = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    shown = between.replace("[CALL_ID]", "").strip()
    assert found(parser_of("mistral", hidden=hidden), text) == Found(shown, BOTH[:1])
    assert found(parser_of("mistral", hidden=hidden), "[TOOL_CALLS][ARGS]") == Found()


def test_special_tokens_may_come_inside_of_arguments() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}'
    found_calls = found(parser_of("mistral", hidden=("[TOOL_CALLS]", "[ARGS]")), text).calls
    assert found_calls == [("f", '{"x": "[TOOL_CALLS]"}')]


class Counting(Reader):
    """Counts how often a character is looked at."""

    looks = 0

    def peek(self) -> Reading[str]:
        self.looks += 1
        return super().peek()


@pytest.mark.parametrize(
    ("before", "repeated", "after"),
    [
        ("", "word < ", ""),
        ("<tool_call>", "<tool_call> ", ""),
        ("<tool_call>", " ", F),
        ('<tool_call>{"name": "f", "arguments": {"x": [', '"text", ', ""),
        ('<tool_call>{"arguments": {"x": [', "1.5, {}, ", '0]}, "name": "f"}'),
        ('<tool_call>{"name": "', "f", ""),
    ],
)
def test_no_character_is_looked_at_again_and_again(before: str, repeated: str, after: str) -> None:
    def looks(times: int) -> int:
        reader = Counting(NAMES)
        for _ in events(
            CallParser(reader, STYLES["hermes"].read), before + repeated * times + after
        ):
            pass
        return reader.looks

    few, many = looks(100), looks(1000)
    assert many < 10.1 * few


def test_nesting_without_end_takes_no_stack() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100_000
    [(_, arguments)] = found(parser_of("hermes"), [text]).calls
    assert arguments.endswith("[" * 100_000)


def test_forced_calls_are_a_list() -> None:
    parser = CallParser(Reader(NAMES), read_list)
    assert found(parser, f"[{PF}, {PG}]") == Found("", BOTH)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (9, Found('[{"name":')),
        (33, Found("", [("f", '{"x"')])),
        (len(PF) + 6, Found(', {"n', BOTH[:1])),
    ],
)
def test_a_list_that_is_cut_off_keeps_what_it_has(length: int, expected: Found) -> None:
    parser = CallParser(Reader(NAMES), read_list)
    assert found(parser, [f"[{PF}, {PG}]"[:length]]) == expected


def test_the_answer_to_a_named_function_is_its_arguments() -> None:
    assert events(OneCall("f"), ["", '{"x', '": 1}']) == [
        [], [start("f"), piece('{"x')], [piece('": 1}')], [],
    ]  # fmt: skip


def test_plain_text_is_content() -> None:
    assert events(PlainText(), ["a", "", "<tool_call>"]) == [["a"], [], ["<tool_call>"], []]


fragments = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[",
     "]", ",", ";", " ", "\n", "{", "}", '"', "\\", '"name"', ":", '"f"', '"arguments"', "<",
     '{"x": 1}', F, PF, G, "f", "word", "-1.5e3", '"parameters": {"y": [1, {"z": "\\u00e9"}]']
)  # fmt: skip
answers = st.lists(fragments | st.text(max_size=3), max_size=20).map("".join)


@given(
    style=st.sampled_from(sorted(STYLES)),
    answer=answers,
    places=st.lists(st.integers(0, 10**6), max_size=12),
    max_calls=st.sampled_from([None, 1]),
    hides=st.booleans(),
)
def test_however_the_text_is_cut_the_same_is_found(
    style: str, answer: str, places: list[int], max_calls: int | None, hides: bool
) -> None:
    hidden = STYLES[style].markers if hides else ()
    whole, pieces = (
        found(parser_of(style, max_calls=max_calls, hidden=hidden), some)
        for some in ([answer], cut(answer, places))
    )
    assert pieces == whole


@given(style=st.sampled_from(sorted(STYLES)), answer=answers)
def test_nothing_is_invented(style: str, answer: str) -> None:
    """All that comes out stands in the answer, in its order."""
    out = found(parser_of(style), [answer])
    rest = iter(answer)
    assert all(character in rest for character in out.content)
    at = 0
    for name, arguments in out.calls:
        assert name in NAMES
        at = answer.index(arguments, at) + len(arguments)


@given(style=st.sampled_from(sorted(STYLES)), answer=answers)
def test_an_answer_without_calls_is_all_content(style: str, answer: str) -> None:
    out = found(parser_of(style), [answer])
    if not out.calls:
        assert out.content == answer
