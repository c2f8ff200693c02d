"""Tools in chats, over an engine that answers with what it is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import httpx
import pytest

from loramux import Guide
from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.server.tools.styles import STYLES
from loramux.testing import FakeCodec, FakeEngine

pytestmark = pytest.mark.anyio

TEMPLATES = {
    "hermes": '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": <name>, "parameters": <object>}',
    "mistral": "[TOOL_CALLS]",
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; '
    '{"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
F: dict[str, Any] = {"name": "f", "description": "does f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": F}, {"type": "function", "function": {"name": "g"}}]
NAMED = {"type": "function", "function": {"name": "f"}}


class Echo(FakeCodec):
    """Its prompts are the last message, so that an answer is what the test sends."""

    def __init__(self, tool_template: str = TEMPLATES["hermes"]) -> None:
        super().__init__(tool_template=tool_template)
        self.tools: list[Mapping[str, Any]] = []
        self.messages: list[Mapping[str, Any]] = []

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        super().render_chat(messages, tools)
        self.messages, self.tools = list(messages), list(tools)
        return self.encode(messages[-1]["content"])


@pytest.fixture
def codec(engine: FakeEngine) -> Echo:
    engine.text = codec = Echo()
    return codec


async def post(client: httpx.AsyncClient, text: str = "hi", **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    asked = {"model": "base", "messages": messages, "tools": TOOLS, **body}
    return await client.post("/v1/chat/completions", json=asked)


async def choices(client: httpx.AsyncClient, text: str, **body: Any) -> list[dict[str, Any]]:
    return (await post(client, text, **body)).raise_for_status().json()["choices"]


async def stream(client: httpx.AsyncClient, text: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of an answer."""
    response = (await post(client, text, stream=True, **body)).raise_for_status()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def message_of(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a choice's deltas add up to, as OpenAI tells to add them."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["function"]["arguments"] == ""
                    assert call["type"] == "function"
                    message["tool_calls"].append({k: call[k] for k in ("id", "type", "function")})
                else:
                    assert call.keys() == {"index", "function"}
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                message["finish_reason"] = choice["finish_reason"]
    return message


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], function["arguments"]) for function in functions]


BOTH = [("f", '{"x": 1}'), ("g", "{}")]


@pytest.mark.parametrize("style", CALLS)
async def test_calls_are_parsed_in_the_style_of_the_template(
    client: httpx.AsyncClient, codec: Echo, style: str
) -> None:
    codec.tool_template = TEMPLATES[style]
    [choice] = await choices(client, CALLS[style])
    assert called(choice["message"]) == BOTH
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert {call["type"] for call in choice["message"]["tool_calls"]} == {"function"}


@pytest.mark.parametrize("style", CALLS)
async def test_a_stream_adds_up_to_the_same_message(
    client: httpx.AsyncClient, codec: Echo, style: str
) -> None:
    codec.tool_template = TEMPLATES[style]
    chunks = await stream(client, "Well. " + CALLS[style])
    message = message_of(chunks)
    assert (message["content"], called(message)) == ("Well.", BOTH)
    assert message["finish_reason"] == "tool_calls"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    pieces = [
        call["function"]["arguments"]
        for chunk in chunks
        for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 8, "arguments come in pieces"


@pytest.mark.parametrize(
    ("style", "pattern"),
    [
        ("hermes", "call_[0-9a-f]{24}"),
        ("llama3", "call_[0-9a-f]{24}"),
        ("mistral", "[a-zA-Z0-9]{9}"),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
async def test_ids_are_such_as_the_template_takes(
    client: httpx.AsyncClient, codec: Echo, style: str, pattern: str, forced: bool
) -> None:
    codec.tool_template = TEMPLATES[style]
    how: dict[str, Any] = {"tool_choice": "required"} if forced else {}
    text = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]'
    [choice] = await choices(client, text if forced else CALLS[style], **how)
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
    assert len(set(ids)) == 2


async def test_the_option_says_how_a_model_calls_whose_template_does_not() -> None:
    engine = FakeEngine(codec=Echo("{{ tools }}"))
    app = create_app(engine, options=ServerOptions(tool_parser="mistral"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        [choice] = await choices(client, CALLS["mistral"])
    assert called(choice["message"]) == BOTH


def test_every_style_is_a_value_of_the_option() -> None:
    assert {ServerOptions(tool_parser=style).tool_parser for style in STYLES} == set(TEMPLATES)


async def test_a_style_that_nobody_knows_is_refused(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine
) -> None:
    codec.tool_template = "{{ tools }}"
    response = await post(client)
    assert response.status_code == 400
    assert "--tool-parser (hermes, llama3, mistral)" in response.json()["error"]["message"]
    assert engine.requests == []
    [choice] = await choices(client, '[{"name": "g", "parameters": {}}]', tool_choice="required")
    assert called(choice["message"]) == [("g", "{}")]


async def test_the_template_of_an_adapters_own_tokenizer_counts(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine
) -> None:
    engine.codecs["shout"] = Echo(TEMPLATES["mistral"])
    tools = [{"type": "function", "function": {"name": "F"}}]
    text = '[TOOL_CALLS]F[ARGS]{"X": 1}'  # the fake engine's adapters answer in upper case
    [choice] = await choices(client, text, tools=tools, model="shout")
    assert called(choice["message"]) == [("F", '{"X": 1}')]
    [choice] = await choices(client, text, tools=tools)
    assert choice["message"]["content"] == text, "the base has a template of another style"


async def test_a_template_without_tools_is_refused(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine
) -> None:
    codec.tool_template = ""
    for choice in ("auto", "required", NAMED):
        response = await post(client, tool_choice=choice)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
    assert engine.requests == []
    await choices(client, "hi", tool_choice="none")


async def test_the_model_is_told_of_tools_unless_it_may_not_call_any(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    await choices(client, "hi", tools=[{"type": "function", "function": {**F, "strict": False}}])
    assert codec.tools == [TOOLS[0]]
    await choices(client, "hi", tools=TOOLS[1:])
    [tool] = codec.tools
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}}
    [choice] = await choices(client, CALLS["hermes"], tool_choice="none")
    assert codec.tools == []
    assert choice["message"]["content"] == CALLS["hermes"]
    assert "tool_calls" not in choice["message"]


async def test_conversations_hold_calls_and_their_results(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "7"}]},
    ]
    await choices(client, "", messages=messages)
    function = {"name": "f", "arguments": {"x": 1}}
    assert codec.messages == [
        messages[0],
        {"role": "assistant", "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]


async def test_a_message_with_calls_can_be_sent_back(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    [choice] = await choices(client, "Well. " + CALLS["hermes"])
    messages = [choice["message"], {"role": "user", "content": "and?"}]
    await choices(client, "", messages=messages)
    assert [c["function"]["arguments"] for c in codec.messages[0]["tool_calls"]] == [{"x": 1}, {}]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, fields]}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def assistant(**function: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return message(role="assistant", tool_calls=[call])


ARGUMENTS = "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "function"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        (function(name="a b"), "tools.0.function.name", "pattern"),
        (function(name="a" * 65), "tools.0.function.name", "pattern"),
        (function(name=""), "tools.0.function.name", "pattern"),
        (function(parameters=[]), "tools.0.function.parameters", "an object"),
        (function(parameters={"type": "string"}), "tools.0.function.parameters", "of an object"),
        (function(cached=True), "tools.0.function.cached", "not supported"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "2 functions called 'f'"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.function", "missing"),
        ({"tool_choice": ["f"]}, "tool_choice.function", "object"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h'"),
        ({"functions": [F]}, "functions", "not supported"),
        ({"function_call": {"name": "f"}}, "function_call", "not supported"),
        ({"guided_regex": "a"}, "guided_regex", "tools exclude each other"),
        ({"response_format": {"type": "json_object"}, "tool_choice": NAMED}, "response_format",
         "tools exclude each other"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "tools contradict"),
        (message(role="tool", content="7"), "messages.1.tool_call_id", "missing"),
        (message(role="user", content="7", tool_call_id="a"), "messages.1.tool_call_id", "leave"),
        (message(role="tool", tool_call_id="a"), "messages.1.content", "missing"),
        (message(role="assistant", content=None), "messages.1.content", "missing"),
        ({"messages": [assistant()["messages"][1] | {"role": "user", "content": "a"}]},
         "messages.0.tool_calls", "assistant"),
        (assistant(arguments='{"x": '), ARGUMENTS, "not valid JSON"),
        (assistant(arguments=""), ARGUMENTS, "not valid JSON"),
        (assistant(arguments="[1]"), ARGUMENTS, "must be a JSON object"),
        (assistant(arguments='{"x": NaN}'), ARGUMENTS, "not valid JSON"),
        (assistant(arguments='{"x": "\\ud800"}'), ARGUMENTS, "not valid JSON"),
        (assistant(arguments={"x": 1}), ARGUMENTS, "string"),
        (assistant(name="a b"), "messages.1.tool_calls.0.function.name", ""),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_by_its_name(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine, body: dict, param: str, told: str
) -> None:
    response = await post(client, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert told in error["message"]
    assert engine.requests == []


async def test_a_guide_may_stand_beside_tools_that_are_not_used(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine
) -> None:
    await choices(client, "hi", tool_choice="none", guided_regex="a")
    assert engine.requests[0].params.guide == Guide.regex("a")


async def test_one_call_comes_out_where_they_may_not_be_parallel(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    [choice] = await choices(client, CALLS["hermes"], parallel_tool_calls=False)
    assert called(choice["message"]) == BOTH[:1]
    assert choice["message"]["content"] is None
    assert (
        called(message_of(await stream(client, CALLS["hermes"], parallel_tool_calls=False)))
        == (BOTH[:1])
    )


async def test_text_without_calls_is_an_answer_as_ever(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    [choice] = await choices(client, "Hello <b>you</b>! ")
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello <b>you</b>! ",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_stays_and_says_so(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    text = CALLS["hermes"]
    cut = text.index("1}}") + 1
    [choice] = await choices(client, text, max_tokens=cut)
    assert (choice["finish_reason"], called(choice["message"])) == ("length", [("f", '{"x": 1')])
    [choice] = await choices(client, text, max_tokens=20)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == text[:20]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_named_function_is_called_with_the_answer(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine, streamed: bool
) -> None:
    text, how = '{"x": 12}', {"tool_choice": NAMED}
    if streamed:
        answer = message_of(await stream(client, text, **how))
        reason = answer["finish_reason"]
    else:
        [choice] = await choices(client, text, **how)
        answer, reason = choice["message"], choice["finish_reason"]
    assert called(answer) == [("f", text)]
    assert not answer["content"]
    assert reason == "stop"
    [request] = engine.requests
    assert request.params.guide == Guide.json(SCHEMA)


@pytest.mark.parametrize("streamed", [False, True])
async def test_required_calls_are_a_guided_list(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine, streamed: bool
) -> None:
    text = '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]'
    if streamed:
        answer = message_of(await stream(client, text, tool_choice="required"))
        reason = answer["finish_reason"]
    else:
        [choice] = await choices(client, text, tool_choice="required")
        answer, reason = choice["message"], choice["finish_reason"]
    assert called(answer) == BOTH
    assert reason == "tool_calls"
    [request] = engine.requests
    assert request.params.guide is not None
    assert "maxItems" not in request.params.guide.text


async def test_a_list_of_required_calls_may_be_of_one(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine
) -> None:
    await choices(client, "[]", tool_choice="required", parallel_tool_calls=False)
    [request] = engine.requests
    assert request.params.guide is not None
    assert json.loads(request.params.guide.text)["maxItems"] == 1


@pytest.mark.parametrize(("strict", "guided"), [(True, True), (False, False), (None, False)])
async def test_strict_functions_are_guided_where_the_model_chooses(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine, strict: bool | None, guided: bool
) -> None:
    tools = [{"type": "function", "function": {**F, "strict": strict}}, TOOLS[1]]
    [choice] = await choices(client, CALLS["hermes"], tools=tools)
    assert called(choice["message"]) == BOTH
    guide = engine.requests[0].params.guide
    assert (guide is not None and guide.kind == "grammar") == guided


class WithSpecial(Echo):
    """Some of the markers are special tokens."""

    special_tokens: Collection[str] = ("[TOOL_CALLS]", "<s>")


@pytest.mark.parametrize(
    ("how", "kept"),
    [({}, ("[TOOL_CALLS]",)), ({"tool_choice": "none"}, ()), ({"skip_special_tokens": False}, ())],
)
async def test_the_engine_keeps_special_tokens_that_mark_calls(
    client: httpx.AsyncClient, engine: FakeEngine, how: dict[str, Any], kept: tuple[str, ...]
) -> None:
    engine.text = WithSpecial(TEMPLATES["mistral"])
    await choices(client, "a [TOOL_CALLS] b", **how)
    assert engine.requests[0].params.kept_special_tokens == kept


async def test_a_marker_that_is_a_special_token_is_no_content(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.text = WithSpecial(TEMPLATES["mistral"])
    [choice] = await choices(client, "a [TOOL_CALLS]b")
    assert choice["message"]["content"] == "a b"


async def test_each_of_n_choices_has_calls_of_its_own(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    three = await choices(client, CALLS["hermes"], n=3)
    assert [called(choice["message"]) for choice in three] == [BOTH] * 3
    ids = {call["id"] for choice in three for call in choice["message"]["tool_calls"]}
    assert len(ids) == 6
    chunks = await stream(client, CALLS["hermes"], n=2)
    assert [called(message_of(chunks, index)) for index in (0, 1)] == [BOTH] * 2


async def test_what_is_told_of_tokens_comes_once_in_a_stream(
    client: httpx.AsyncClient, codec: Echo
) -> None:
    text = "So " + CALLS["hermes"]
    chunks = await stream(
        client,
        text,
        logprobs=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [t for part in parts for t in part.get("token_ids", [])] == codec.encode(text)
    told = [
        token["token"]
        for part in parts
        if part["logprobs"]
        for token in part["logprobs"]["content"]
    ]
    assert "".join(told) == text
    assert chunks[-1]["usage"]["completion_tokens"] == len(text)


async def test_tokens_that_share_an_event_may_become_several_deltas(
    codec: Echo, engine: FakeEngine
) -> None:
    app = create_app(engine, options=ServerOptions(stream_interval=1))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        chunks = await stream(client, "So " + CALLS["hermes"], return_token_ids=True)
    message = message_of(chunks)
    assert (message["content"], called(message)) == ("So", BOTH)
    assert len(chunks) < 12
    assert sum(len(c["choices"][0].get("token_ids", [])) for c in chunks) == len(
        "So " + CALLS["hermes"]
    )


async def test_a_stop_string_ends_an_answer_with_calls(
    client: httpx.AsyncClient, codec: Echo, engine: FakeEngine
) -> None:
    await choices(client, CALLS["hermes"], stop=["</tool_call>"])
    assert engine.requests[0].params.stop == ("</tool_call>",)


async def test_tokenize_counts_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.text = FakeCodec(tool_template="x")
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    answer = (await client.post("/tokenize", json=body)).raise_for_status().json()
    assert answer["tokens"] == engine.text.encode("tools:f,g\nuser:hi\n")
    response = await client.post("/tokenize", json={"prompt": "a", "tools": TOOLS})
    assert response.status_code == 400
