"""Whose prompts may find what others have computed, and where an answer tells of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.testing import FakeEngine
from tests.server.test_errors import error_of
from tests.server.test_keys import CHAT, bearer, key, limited, serve
from tests.server.test_streams import chat, complete

pytestmark = pytest.mark.anyio

COMPLETION = {"model": "base", "prompt": "abcd"}
ENDPOINTS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


async def cached(client: httpx.AsyncClient, name: str | None = None, **body: Any) -> int:
    """Tokens of a completion's prompt that were found, asked with a key or without."""
    headers = bearer(name) if name else None
    response = await client.post("/v1/completions", json=COMPLETION | body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_usage_tells_what_was_found(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    usages = [(await client.post(path, json=body)).json()["usage"] for _ in range(2)]
    length = usages[0]["prompt_tokens"]
    details = [usage["prompt_tokens_details"] for usage in usages]
    assert details == [{"cached_tokens": 0}, {"cached_tokens": length - 1}]
    assert usages[0] | {"prompt_tokens_details": details[1]} == usages[1]


@pytest.mark.parametrize("stream", [complete, chat])
async def test_the_usage_of_a_stream_tells_it_too(client: httpx.AsyncClient, stream: Any) -> None:
    asked = {"stream_options": {"include_usage": True}}
    usages = [(await stream(client, **asked))[-1]["usage"] for _ in range(2)]
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert found == [0, usages[0]["prompt_tokens"] - 1]


async def test_of_several_completions_the_first_one_counts(client: httpx.AsyncClient) -> None:
    assert [await cached(client, n=3), await cached(client, n=3)] == [0, 3]


async def test_several_prompts_add_up(client: httpx.AsyncClient) -> None:
    assert await cached(client, prompt=["abcd", "abce", "abcf"]) == 6


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_salt_reaches_the_engine(
    engine: FakeEngine, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    for salt in ("x", None):
        assert (await client.post(path, json=body | {"cache_salt": salt})).status_code == 200
    assert [request.cache_salt for request in engine.requests] == ["x", None]


@pytest.mark.parametrize("salt", ["", 1, ["x"]])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_what_is_no_salt_is_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], salt: Any
) -> None:
    response = await client.post(path, json=body | {"cache_salt": salt})
    assert error_of(response, 400)["param"] == "cache_salt"


async def test_salts_share_nothing(client: httpx.AsyncClient) -> None:
    salts = ({}, {"cache_salt": "x"}, {"cache_salt": "y"})
    assert [await cached(client, **salt) for salt in salts] == [0, 0, 0]
    assert [await cached(client, **salt) for salt in salts] == [3, 3, 3]


async def test_keys_share_nothing_whatever_salts_they_send(engine: FakeEngine) -> None:
    salts = ({}, {"cache_salt": "x"}, {"cache_salt": "one/x"}, {"cache_salt": "two"})
    callers = [(name, salt) for name in ("one", "two") for salt in salts]
    async with serve(engine, key("one"), limited("two", max_in_flight=4)) as client:
        for expected in (0, 3):
            assert [await cached(client, n, **salt) for n, salt in callers] == [expected] * 8


async def test_metrics_count_tokens_looked_up_and_found(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await cached(client)
    lines = (await client.get("/metrics")).text.splitlines()
    assert "loramux_prefix_cache_queries_total 8.0" in lines
    assert "loramux_prefix_cache_hits_total 3.0" in lines
