"""What strict functions let a model write, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from loramux.engine.text import HFText
from loramux.errors import InvalidRequest
from loramux.guide import Guide
from loramux.server.tools.forced import list_guide, named_guide
from loramux.server.tools.grammar import strict_guide
from loramux.server.tools.schema import FunctionDefinition
from loramux.server.tools.styles import STYLES
from tests.cpu.test_grammars import BYTE_EOS, accepts
from tests.cpu.tool_templates import TEMPLATES, with_tools

ONE_INTEGER = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
F = FunctionDefinition(name="f", parameters=ONE_INTEGER, strict=True)
G = FunctionDefinition(name="g")
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#/$defs/tree"}},
            "additionalProperties": False,
        },
        "leaf": {"enum": ["oak", {"$ref": "#"}]},
    },
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/tree"}, "self": {"$ref": "#"},
                   "default": {"$ref": "#/$defs/leaf"}},
    "additionalProperties": False,
}  # fmt: skip
WHOLE = {"$defs": TREE["$defs"], "$ref": "#/$defs/tree"}


def accepted(tokenizer: Any, guide: Guide, answers: Sequence[str]) -> list[str]:
    """Those of the answers that the guide takes as a whole."""
    grammar = HFText(tokenizer, [BYTE_EOS]).compile(guide)
    return [
        answer
        for answer in answers
        if accepts(grammar, tokenizer.encode(answer, add_special_tokens=False), BYTE_EOS)
    ]


def guide_of(tokenizer: Any, style: str, *, parallel: bool = True) -> Guide:
    added = HFText(tokenizer).added_tokens
    return strict_guide(STYLES[style], [F, G], added, parallel=parallel)


PLAIN = ["", "Hello, {you}!\n", "<tool_ [TOOL <|python", "a <|spare|> b"]
GOOD = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
        'Well.\n<tool_call>{"name": "g", "arguments": {"any": [1]}}</tool_call>',
    ],
    "llama3": [
        '{"name": "f", "parameters": {"x": 1}}',
        'Well <|python_tag|>{"name": "g", "parameters": {"any": [1]}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
        '[TOOL_CALLS] [{"name": "g", "arguments": {"any": [1]}}]',
        'Well [TOOL_CALLS]f[ARGS]{"x": 1}',
        'Well [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}',
    ],
}
SEVERAL = {
    "hermes": [" then ".join(GOOD["hermes"])],
    "llama3": ["; ".join([GOOD["llama3"][0]] * 2), " ".join(GOOD["llama3"])],
    "mistral": [
        " and ".join(GOOD["mistral"]),
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
    ],
}
BAD = {
    "hermes": [
        "<tool_call>",
        "a <tool_call> b",
        '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1}}',
    ],
    "llama3": [
        "<|python_tag|>import os",
        '{"age": 3}',
        '{"name": "f", "parameters": {"x": null}}',
        '{"name": "f", "parameters": {"x": 1}}; bye',
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]h[ARGS]{}",
        "[TOOL_CALLS]f[ARGS]{}",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        "[TOOL_CALLS][]",
    ],
}


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("spelled", [False, True])
def test_text_passes_and_calls_keep_to_their_schemas(
    byte_level: Any, style: str, spelled: bool
) -> None:
    """Whether markers are tokens of the vocabulary or not."""
    tokenizer = byte_level if spelled else with_tools(byte_level, style)
    guide = guide_of(tokenizer, style)
    good = [*PLAIN, *GOOD[style], *SEVERAL[style]]
    assert accepted(tokenizer, guide, good) == good
    assert accepted(tokenizer, guide, BAD[style]) == []


@pytest.mark.parametrize("style", TEMPLATES)
def test_one_call_ends_the_answer_where_they_may_not_be_parallel(
    byte_level: Any, style: str
) -> None:
    tokenizer = with_tools(byte_level, style)
    guide = guide_of(tokenizer, style, parallel=False)
    good = [*PLAIN, *GOOD[style]]
    assert accepted(tokenizer, guide, good) == good
    assert accepted(tokenizer, guide, [*BAD[style], *SEVERAL[style]]) == []


def test_tokens_that_mark_something_else_pass(byte_level: Any) -> None:
    tokenizer = with_tools(byte_level, "hermes")
    answer = "<think>So" + GOOD["hermes"][0]
    assert accepted(tokenizer, guide_of(tokenizer, "hermes"), [answer]) == [answer]


def test_a_marker_that_is_spelled_counts_though_it_is_a_token(byte_level: Any) -> None:
    tokenizer = with_tools(byte_level, "hermes")
    grammar = HFText(tokenizer, [BYTE_EOS]).compile(guide_of(tokenizer, "hermes"))

    good, bad = (byte_level.encode(some["hermes"][0]) for some in (GOOD, BAD))
    assert max(good) < min(HFText(tokenizer).added_tokens.values())
    assert accepts(grammar, good, BYTE_EOS)
    assert not accepts(grammar, bad, BYTE_EOS)


def test_white_space_in_arguments_is_bounded(byte_level: Any) -> None:
    tokenizer = with_tools(byte_level, "hermes")
    answers = [
        f'<tool_call>{{"name": "f", "arguments": {{{space}"x": 1}}}}</tool_call>'
        for space in ("", " ", "\n  ", "    ", "\n\n")
    ]
    assert accepted(tokenizer, guide_of(tokenizer, "hermes"), answers) == answers[:3]


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (
            TREE,
            '{"tree": {"next": {"leaf": "oak"}}, "self": {"self": {}}, "default": "oak"}',
            ['{"tree": {"leaf": "elm"}}', '{"self": {"leaf": "oak"}}', '{"default": "elm"}'],
        ),
        (WHOLE, '{"leaf": "oak", "next": {"leaf": "oak"}}', ['{"leaf": "elm"}', '"oak"']),
    ],
)
@pytest.mark.parametrize("form", ["strict", "required", "named"])
def test_schemas_may_refer_to_themselves(
    byte_level: Any, form: str, parameters: dict[str, Any], good: str, bad: list[str]
) -> None:
    function = FunctionDefinition(name="f", parameters=parameters, strict=True)
    if form == "strict":
        guide = strict_guide(STYLES["mistral"], [G, function], {}, parallel=True)
        head, tail = "[TOOL_CALLS]f[ARGS]", ""
    elif form == "required":
        guide = list_guide([G, function], parallel=True)
        head, tail = '[{"name": "f", "parameters": ', "}]"
    else:
        guide, head, tail = named_guide(function), "", ""
    answers = [head + arguments + tail for arguments in (good, *bad)]
    assert accepted(byte_level, guide, answers) == answers[:1]


def test_required_calls_are_one_or_more_of_the_tools(byte_level: Any) -> None:
    f, g = '{"name": "f", "parameters": {"x": 1}}', '{"name": "g", "parameters": {}}'
    one, two = f"[{f}]", f"[{f},{g}]"
    others = ["[]", f, '[{"name": "h", "parameters": {}}]', '[{"name": "f", "parameters": {}}]',
              '[{"name": "g", "parameters": {"x": 1}}]']  # fmt: skip
    answers = [one, two, *others]
    assert accepted(byte_level, list_guide([F, G], parallel=True), answers) == [one, two]
    assert accepted(byte_level, list_guide([F, G], parallel=False), answers) == [one]


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"type": "object", "properties": {"x": {"not": {}}}}, "not"),
        ({"type": "object", "properties": {"x": {"pattern": "a" * 9000}}}, "pattern"),
        ({"type": "object", "description": "a" * 20_000}, "the limit is 16384"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    byte_level: Any, parameters: dict[str, Any], told: str
) -> None:
    function = FunctionDefinition(name="f", parameters=parameters, strict=True)
    with pytest.raises(InvalidRequest, match=told) as caught:
        accepted(byte_level, strict_guide(STYLES["hermes"], [function], {}, parallel=True), [])
    assert caught.value.param == "tools"
