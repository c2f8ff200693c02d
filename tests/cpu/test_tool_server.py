"""Calls of a real engine, which are made to be calls, through OpenAI's shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loramux.config import EngineOptions, ServerOptions
from loramux.engine.build import assemble
from loramux.model.load import adopt
from loramux.server.app import create_app
from loramux.testing import tiny_model
from tests.cpu.engines import async_engine
from tests.cpu.tool_templates import with_tools

pytestmark = pytest.mark.anyio

MARKER = 300
"""The token that begins a call, in the tokenizers of both styles."""
COLOURS = ["red", "green"]
PAINT = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": COLOURS}, "coats": {"type": "integer", "maximum": 9}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS = [
    {"type": "function", "function": PAINT},
    {"type": "function", "function": {"name": "stop", "strict": True}},
]
NAMED = {"type": "function", "function": {"name": "paint"}}


class Bench:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, **how: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": "tiny", "messages": messages, "tools": TOOLS, "temperature": 0, **how}
        answer = await self._client.post("/v1/chat/completions", json=body)
        return answer.raise_for_status()

    async def choice(self, **how: Any) -> dict[str, Any]:
        [choice] = (await self.ask(**how)).json()["choices"]
        return choice

    async def streamed(self, **how: Any) -> tuple[str, list[list[str]], str]:
        """Content, names with arguments, and the reason to finish, of a streamed choice."""
        content, calls, reason = "", [], ""
        for line in (await self.ask(stream=True, **how)).text.split("\n\n")[:-2]:
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
        return content, calls, reason


@pytest.fixture
async def bench(request: pytest.FixtureRequest, byte_level: Any) -> AsyncIterator[Bench]:
    """Over a model whose tokenizer has the style that the test asks for."""
    model = tiny_model(vocab_size=310, max_positions=1500)
    model.config.eos_token_id = model.generation_config.eos_token_id = 295  # 2 is a byte here
    tokenizer = with_tools(byte_level, request.param)
    parts = assemble(adopt("tiny", model), tokenizer, EngineOptions(), "tiny")
    engine = async_engine(parts, max_open=50)
    await engine.start()
    transport = httpx.ASGITransport(create_app(engine, options=ServerOptions(stream_interval=0)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Bench(client)
    await engine.stop()
    parts.core.check()


both_styles = pytest.mark.parametrize("bench", ["hermes", "mistral"], indirect=True)
hermes = pytest.mark.parametrize("bench", ["hermes"], indirect=True)
mistral = pytest.mark.parametrize("bench", ["mistral"], indirect=True)


def pairs(message: dict[str, Any]) -> list[list[str]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [[function["name"], function["arguments"]] for function in functions]


def check_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "paint":
        assert list(found) == ["colour", "coats"]
        assert found["colour"] in COLOURS
        assert type(found["coats"]) is int
        assert found["coats"] <= 9
    else:
        assert (name, found) == ("stop", {})


@both_styles
async def test_a_named_function_gets_arguments_of_its_schema(bench: Bench) -> None:
    choice = await bench.choice(tool_choice=NAMED)
    [(name, arguments)] = pairs(choice["message"])
    assert name == "paint"
    check_call(name, arguments)
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"
    assert await bench.streamed(tool_choice=NAMED) == ("", [[name, arguments]], "stop")


@both_styles
@pytest.mark.parametrize("seed", range(4))
async def test_required_calls_parse(bench: Bench, seed: int) -> None:
    how = {"tool_choice": "required", "temperature": 1.5, "seed": seed, "max_tokens": 500}
    choice = await bench.choice(**how)
    calls = pairs(choice["message"])
    for call in calls if choice["finish_reason"] == "tool_calls" else calls[:-1]:
        check_call(*call)
    assert calls
    content = choice["message"]["content"] or ""
    assert await bench.streamed(**how) == (content, calls, choice["finish_reason"])


@hermes
async def test_one_required_call_is_one(bench: Bench) -> None:
    choice = await bench.choice(tool_choice="required", parallel_tool_calls=False)
    [call] = pairs(choice["message"])
    check_call(*call)
    assert choice["finish_reason"] == "tool_calls"


@both_styles
async def test_a_strict_call_that_the_model_begins_keeps_to_its_schema(bench: Bench) -> None:
    how = {"logit_bias": {MARKER: 100}, "parallel_tool_calls": False}
    choice = await bench.choice(**how)
    [call] = pairs(choice["message"])
    check_call(*call)
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert await bench.streamed(**how) == ("", [call], "tool_calls")


@both_styles
async def test_strict_calls_follow_each_other(bench: Bench) -> None:
    choice = await bench.choice(logit_bias={MARKER: 100}, max_tokens=400)
    calls = pairs(choice["message"])
    assert len(calls) > 1
    for call in calls[:-1]:
        check_call(*call)


@mistral
async def test_markers_that_are_special_tokens_are_seen_and_not_shown(bench: Bench) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    how = {"tools": tools, "logit_bias": {MARKER: 100}, "max_tokens": 3, "return_token_ids": True}
    choice = await bench.choice(**how)
    assert choice["token_ids"] == [MARKER] * 3
    assert choice["message"]["content"] == ""
    choice = await bench.choice(**how, skip_special_tokens=False)
    assert choice["message"]["content"] == "[TOOL_CALLS]" * 3


@hermes
async def test_choices_with_and_without_calls_share_a_batch(bench: Bench) -> None:
    how = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 3}
    choices = (await bench.ask(n=3, **how)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        [call] = pairs(choice["message"])
        check_call(*call)
