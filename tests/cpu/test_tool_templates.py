"""Tools through chat templates, and their markers through detokenizers."""

from __future__ import annotations

from typing import Any

import pytest

from loramux.engine.adapter_text import AdapterText
from loramux.engine.text import HFText
from loramux.errors import InvalidRequest
from loramux.server.tools.styles import find_style
from tests.cpu.tool_templates import TEMPLATES, with_tools

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
ASK = {"role": "user", "content": "go"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": 1}},
}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "abcdefghi"}


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return tokenizer.decode(HFText(tokenizer).render_chat(messages, tools))


@pytest.mark.parametrize("style", TEMPLATES)
def test_the_style_is_read_off_the_template(byte_level: Any, style: str) -> None:
    found = find_style(HFText(with_tools(byte_level, style)).tool_template)
    assert found is not None
    assert found.name == style


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools }}",
        '{{ tools }}<tool_call>\n<function=f>\n"arguments"</tool_call>',
        '{{ tools }}<tool_call>f\n<arg_key>a</arg_key>"arguments"</tool_call>',
        '{{ tools }}{"name": "f", "parameters": {}}',
        "{{ tools }}{# [TOOL_CALLS] #}",
        "{{ tools",
    ],
)
def test_other_templates_say_nothing_of_a_style(byte_level: Any, template: str) -> None:
    tokenizer = with_tools(byte_level, "hermes")
    tokenizer.chat_template = template
    assert find_style(HFText(tokenizer).tool_template) is None


def test_no_template_has_no_text(tiny: Any) -> None:
    assert HFText(tiny).tool_template == ""


@pytest.mark.parametrize(
    ("style", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"x": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]'),
    ],
)
def test_tools_and_calls_are_in_the_prompt(byte_level: Any, style: str, written: str) -> None:
    tokenizer = with_tools(byte_level, style)
    found = rendered(tokenizer, [ASK, CALLED, RESULT], [TOOL])
    assert '"integer"' in found
    assert written in found
    assert "7" in found
    assert '"integer"' not in rendered(tokenizer, [ASK, CALLED, RESULT], [])


def test_a_template_without_tools_refuses_them(byte_level: Any) -> None:
    with pytest.raises(InvalidRequest, match="no place for tools") as caught:
        HFText(byte_level).render_chat([ASK], [TOOL])
    assert caught.value.param == "tools"


def test_a_template_without_calls_refuses_messages_with_them(byte_level: Any) -> None:
    with pytest.raises(InvalidRequest, match="no place for the tool_calls") as caught:
        HFText(byte_level).render_chat([ASK, CALLED])
    assert caught.value.param == "messages"


def test_what_a_template_says_against_tools_is_the_requests_fault(byte_level: Any) -> None:
    call = {**CALL, "id": "call_0"}
    with pytest.raises(InvalidRequest, match="nine characters"):
        rendered(with_tools(byte_level, "mistral"), [{**CALLED, "tool_calls": [call]}], [TOOL])


def test_of_several_templates_that_for_tools_is_looked_at(byte_level: Any) -> None:
    tokenizer = with_tools(byte_level, "hermes")
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": TEMPLATES["hermes"]}
    text = HFText(tokenizer)
    assert "<tool_call>" in text.tool_template
    assert '"integer"' in rendered(tokenizer, [ASK], [TOOL])
    assert rendered(tokenizer, [ASK], []) == "go"
    with pytest.raises(InvalidRequest, match="no place for the tool_calls"):
        text.render_chat([CALLED])
    tokenizer.chat_template = {"default": plain}
    with pytest.raises(InvalidRequest, match="no place for tools"):
        text.render_chat([ASK], [TOOL])
    tokenizer.chat_template = {"rag": plain}
    with pytest.raises(InvalidRequest):
        text.render_chat([ASK], [TOOL])


def test_an_adapters_template_takes_tools_too(byte_level: Any) -> None:
    tokenizer = with_tools(byte_level, "hermes")
    text = AdapterText(tokenizer, len(tokenizer))
    assert '"integer"' in tokenizer.decode(text.render_chat([ASK], [TOOL]))
    tokenizer.chat_template = "{{ tools.nothing.here }}"
    with pytest.raises(InvalidRequest, match="refuses"):
        text.render_chat([ASK], [TOOL])


@pytest.mark.parametrize("adapter", [False, True])
def test_kept_special_tokens_stay_in_the_text_alone(byte_level: Any, adapter: bool) -> None:
    tokenizer = with_tools(byte_level, "mistral")
    text = AdapterText(tokenizer, len(tokenizer)) if adapter else HFText(tokenizer)
    ids = tokenizer.encode("é<|im_end|>[TOOL_CALLS]f[ARGS]{}<|spare|>!", add_special_tokens=False)
    shown = {
        (): "éf{}!",
        ("[TOOL_CALLS]",): "é[TOOL_CALLS]f{}!",
        ("[TOOL_CALLS]", "[ARGS]", "[NONE]"): "é[TOOL_CALLS]f[ARGS]{}!",
    }
    for kept, expected in shown.items():
        detokenizer = text.detokenizer(kept=kept)
        pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
        assert "".join(pieces) == expected
        assert all(marker not in piece or piece == marker for marker in kept for piece in pieces)
    everything = text.detokenizer(skip_special_tokens=False, kept=("[ARGS]",))
    assert "".join([*map(everything.push, ids), everything.finish()]) == (
        tokenizer.decode(ids, skip_special_tokens=False)
    )


def test_added_tokens_are_told_apart(byte_level: Any) -> None:
    hermes, mistral = (HFText(with_tools(byte_level, style)) for style in ("hermes", "mistral"))
    assert hermes.added_tokens["<tool_call>"] == 300
    assert "<tool_call>" not in hermes.special_tokens
    assert "[TOOL_CALLS]" in mistral.special_tokens
