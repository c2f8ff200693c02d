"""Order and content of server-sent events."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine

pytestmark = pytest.mark.anyio


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; checks its frame and that it ends with [DONE]."""
    response = await client.post(path, json={"model": "base", "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def complete(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    return await events(client, "/v1/completions", **{"prompt": "abc"} | body)


async def chat(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "hi"}]
    return await events(client, "/v1/chat/completions", messages=messages, **body)


def text_of(chunks: list[dict[str, Any]], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


async def test_completion_arrives_token_by_token(client: httpx.AsyncClient) -> None:
    chunks = await complete(client)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", "c"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_chunks_of_several_choices_concatenate(client: httpx.AsyncClient) -> None:
    chunks = await complete(client, prompt=["abc", "de"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == ["abc", "abc", "de", "de"]


async def test_echo_comes_with_each_first_chunk(client: httpx.AsyncClient) -> None:
    chunks = await complete(client, model="shout", prompt=["ab", "c"], n=2, echo=True, logprobs=0)
    assert [text_of(chunks, index) for index in range(4)] == ["abAB", "abAB", "cC", "cC"]
    offsets = [
        offset
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == 1
        for offset in choice["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1, 2, 3]


async def test_usage_is_the_last_chunk_on_request(client: httpx.AsyncClient) -> None:
    *chunks, last = await complete(client, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_token_ids_of_chunks(client: httpx.AsyncClient) -> None:
    chunks = await complete(client, return_token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[97], [98], [99]]
    prompts = [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks]
    assert prompts == [[97, 98, 99], None, None]


async def test_chat_begins_with_the_role(client: httpx.AsyncClient) -> None:
    first, *others = await chat(client)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in others]
    assert all(set(delta) == {"content"} for delta in deltas)
    assert "".join(delta["content"] for delta in deltas) == "user:hi\n"
    assert others[-1]["choices"][0]["finish_reason"] == "stop"


async def test_each_chat_choice_begins_with_the_role(client: httpx.AsyncClient) -> None:
    chunks = await chat(client, n=2)
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in own[1:])


async def test_chat_logprobs_come_with_their_tokens(client: httpx.AsyncClient) -> None:
    _, *others = await chat(client, logprobs=True, max_tokens=2)
    tokens = [chunk["choices"][0]["logprobs"]["content"][0]["token"] for chunk in others]
    assert tokens == ["u", "s"]


async def test_error_in_mid_stream_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error_after = 2
    first, second, last = await complete(client)
    assert text_of([first, second], 0) == "ab"
    assert last["error"]["type"] == "server_error"
    assert last["error"]["message"] == "the logits are NaN"
    assert engine.running == set()


async def test_error_before_the_stream_is_a_status(client: httpx.AsyncClient) -> None:
    body = {"model": "nobody", "prompt": "x", "stream": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 404


async def test_stream_options_need_a_stream(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": "x", "stream_options": {"include_usage": True}}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


async def test_line_separators_stay_inside_their_event(client: httpx.AsyncClient) -> None:
    chunks = await complete(client, prompt="a\u2028\n\r\x85b")
    assert text_of(chunks, 0) == "a\u2028\n\r\x85b"
    body = {"model": "base", "prompt": "\u2028", "stream": True}
    raw = (await client.post("/v1/completions", json=body)).text
    assert "\u2028" not in raw


async def paced(interval: float, tick: float, num_tokens: int) -> list[list[int]]:
    """The tokens of each event of one stream."""
    engine = FakeEngine(tick_seconds=tick)
    app = create_app(engine, options=ServerOptions(stream_interval=interval))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        chunks = await complete(
            client, max_tokens=num_tokens, ignore_eos=True, return_token_ids=True
        )
    return [choice["token_ids"] for chunk in chunks for choice in chunk["choices"]]


async def test_tokens_that_come_fast_share_an_event() -> None:
    events = await paced(0.1, tick=0.005, num_tokens=40)
    assert len(events[0]) == 1, "the first token comes at once"
    assert sum(map(len, events)) == 40
    assert 3 <= len(events) <= 12
    assert [token for event in events for token in event] == [97, 98, 99] * 13 + [97]


async def test_tokens_that_come_slowly_have_events_of_their_own() -> None:
    assert [len(event) for event in await paced(0.001, tick=0.02, num_tokens=6)] == [1] * 6


async def test_the_end_of_a_stream_is_not_held_back() -> None:
    began = time.perf_counter()
    events = await paced(1.0, tick=0.0, num_tokens=5)
    assert [len(event) for event in events] == [1, 4]
    assert time.perf_counter() - began < 0.9


async def test_choices_that_share_a_batch_stay_apart() -> None:
    app = create_app(FakeEngine(), options=ServerOptions(stream_interval=1.0))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        chunks = await complete(client, prompt=["abc", "xy"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == ["abc", "abc", "xy", "xy"]
