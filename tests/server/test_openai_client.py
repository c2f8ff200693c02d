"""The real OpenAI client against a real server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from loramux.server.app import create_app
from loramux.server.keys import Key, Keyring
from loramux.server.limits import Limits
from loramux.testing import FakeCodec, FakeEngine, echoed_embedding
from loramux.types import PoolingParams, numbers_of
from tests.server.conftest import serving


@pytest.fixture
def sync(live: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live}/v1", api_key="none", max_retries=0) as client:
        yield client


def messages(text: str) -> list:
    return [{"role": "user", "content": text}]


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def calling(engine: FakeEngine) -> None:
    """The engine's answers, which repeat their prompts, are read for calls in Hermes' style."""
    engine.text = FakeCodec(tool_template='<tool_call>{"name": …, "arguments": …}')


def test_completion(sync: openai.OpenAI) -> None:
    answer = sync.completions.create(model="shout", prompt="abc", logprobs=1)
    assert answer.choices[0].text == "ABC"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["A", "B", "C"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 6


def test_completion_stream(sync: openai.OpenAI) -> None:
    chunks = list(sync.completions.create(model="base", prompt="abc", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_embeddings(sync: openai.OpenAI) -> None:
    """The client asks for base64 and turns it into numbers, unless it is told otherwise."""
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer: Any = sync.embeddings.create(model="shout", input=["abc", "de"], **more)
        assert [item.index for item in answer.data] == [0, 1]
        for item, text in zip(answer.data, ("ABC", "DE"), strict=True):
            vector = item.embedding
            if more.get("encoding_format") == "base64":
                vector = numbers_of(base64.b64decode(vector))
            expected = echoed_embedding([ord(c) for c in text], PoolingParams())
            assert vector == pytest.approx(expected, abs=1e-6)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
        assert (answer.model, answer.object) == ("shout", "list")
        assert answer.data[0].object == "embedding"


def test_chat(sync: openai.OpenAI) -> None:
    answer = sync.chat.completions.create(
        model="base", messages=messages("hi"), logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "user:hi\n"
    again = [*messages("hi"), answer.choices[0].message, *messages("go on")]
    answer = sync.chat.completions.create(model="base", messages=again)
    assert answer.choices[0].finish_reason == "stop"


def test_chat_stream(sync: openai.OpenAI) -> None:
    stream = sync.chat.completions.create(
        model="base",
        messages=messages("hi"),
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user:hi\n"
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


def test_async_client(live: str) -> None:
    async def run() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *[
                    client.completions.create(model=model, prompt="abc")
                    for model in ("base", "shout")
                ]
            )
            stream = await client.chat.completions.create(
                model="shout", messages=messages("hi"), stream=True
            )
            streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [answer.choices[0].text for answer in answers], "".join(streamed)

    assert asyncio.run(run()) == (["abc", "ABC"], "USER:HI\n")


def test_async_client_embeds(live: str, engine: FakeEngine) -> None:
    async def run() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="none") as client:
            more: Any = {"extra_body": {"pooling": "mean", "normalize": False, "priority": -2}}
            answers = await asyncio.gather(
                client.embeddings.create(model="base", input="ac"),
                client.embeddings.create(model="base", input=[97, 99], **more),
                client.embeddings.create(model="base", input="ac", encoding_format="float"),
            )
            return [answer.data[0].embedding for answer in answers]

    last, mean, plain = asyncio.run(run())
    assert mean == [2.0, 98.0]
    assert last == plain == pytest.approx([2 / math.hypot(2, 99), 99 / math.hypot(2, 99)])
    assert sorted(request.priority for request in engine.requests) == [-2, 0, 0]


@pytest.mark.usefixtures("calling")
def test_async_client_streams_calls(live: str) -> None:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{live}/v1", api_key="none") as client:
            asked: Any = messages(CALL)
            stream = await client.chat.completions.create(
                model="base", messages=asked, tools=[TOOL], stream=True
            )
            return [chunk.choices[0] async for chunk in stream]

    chunks = asyncio.run(run())
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert calls[0].function.name == "weather"
    assert "".join(call.function.arguments for call in calls) == '{"city": "Oslo"}'
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.usefixtures("calling")
def test_a_tool_is_called_and_its_result_sent_back(sync: openai.OpenAI) -> None:
    asked: Any = messages(CALL)
    answer = sync.chat.completions.create(model="base", messages=asked, tools=[TOOL])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "tools:weather\nuser:"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    again = [*asked, choice.message, result]
    answer = sync.chat.completions.create(model="base", messages=again)
    assert "tool:rain" in (answer.choices[0].message.content or "")


@pytest.mark.usefixtures("calling")
def test_the_clients_own_stream_adds_calls_up(sync: openai.OpenAI) -> None:
    asked: Any = messages(CALL + CALL)
    with sync.chat.completions.stream(model="base", messages=asked, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    functions = [call.function for call in choice.message.tool_calls or []]
    assert [(f.name, f.arguments) for f in functions] == [("weather", '{"city": "Oslo"}')] * 2
    assert choice.message.content == "tools:weather\nuser:"


def test_models(sync: openai.OpenAI) -> None:
    assert [model.id for model in sync.models.list()] == ["base", "shout"]
    assert sync.models.retrieve("shout").id == "shout"


def test_unknown_model_is_not_found(sync: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sync.completions.create(model="nobody", prompt="abc")
    assert caught.value.code == "model_not_found"


def test_bad_value_is_a_bad_request(sync: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sync.completions.create(model="base", prompt="abc", temperature=-1)
    assert caught.value.param == "temperature"


def test_error_in_mid_stream_is_raised(sync: openai.OpenAI, engine: FakeEngine) -> None:
    engine.error_after = 1
    stream = sync.completions.create(model="base", prompt="abc", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="the logits are NaN"):
        next(stream)


def test_the_clients_api_key_is_the_key(engine: FakeEngine) -> None:
    digest = hashlib.sha256(b"sk-mine").digest()
    key = Key(name="mine", digest=digest, limits=Limits(requests_per_second=0.01))
    with (
        serving(create_app(engine, keyring=Keyring([key], open_inference=False))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-mine", max_retries=0) as mine,
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-yours", max_retries=0) as stranger,
    ):
        with pytest.raises(openai.AuthenticationError, match="does not know the key"):
            stranger.models.list()
        assert mine.completions.create(model="base", prompt="ab").choices[0].text == "ab"
        with pytest.raises(openai.RateLimitError, match="'mine' has reached") as refused:
            mine.completions.create(model="base", prompt="ab")
        assert 90 <= int(refused.value.response.headers["retry-after"]) <= 100
