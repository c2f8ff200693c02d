"""``POST /v1/embeddings``: what it takes, what it answers, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest

from loramux.server.app import create_app
from loramux.testing import FakeEngine, echoed_embedding
from loramux.types import EmbeddingRequest, PoolingParams, numbers_of
from tests.fake_clock import FakeClock
from tests.server.test_disconnect import abandon, wait_until
from tests.server.test_errors import error_of
from tests.server.test_keys import call, key, limited, serve, used

pytestmark = pytest.mark.anyio


def expected(text: str, **params: Any) -> Any:
    vector = echoed_embedding([ord(c) for c in text], PoolingParams(**params))
    return pytest.approx(vector, rel=1e-6)


async def embed(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/embeddings", json={"model": "base", "input": "abc"} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def vectors(client: httpx.AsyncClient, **body: Any) -> list[list[float]]:
    return [item["embedding"] for item in (await embed(client, **body))["data"]]


async def test_the_answer_has_openais_shape(client: httpx.AsyncClient) -> None:
    assert await embed(client) == {
        "object": "list",
        "model": "base",
        "data": [{"object": "embedding", "index": 0, "embedding": expected("abc")}],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


async def test_the_model_may_be_an_adapter(client: httpx.AsyncClient) -> None:
    assert await vectors(client, model="shout") == [expected("ABC")]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
async def test_input_has_four_forms(
    client: httpx.AsyncClient, given: Any, texts: list[str]
) -> None:
    answer = await embed(client, input=given)
    assert [item["index"] for item in answer["data"]] == list(range(len(texts)))
    assert [item["embedding"] for item in answer["data"]] == [expected(text) for text in texts]
    assert answer["usage"]["prompt_tokens"] == len("".join(texts))


async def test_many_long_inputs_keep_their_order(client: httpx.AsyncClient) -> None:
    texts = [chr(97 + i % 26) * (200 + i) for i in range(150)]
    assert await vectors(client, input=texts) == [expected(text) for text in texts]


async def test_base64_is_the_same_numbers(client: httpx.AsyncClient) -> None:
    [text] = await vectors(client, encoding_format="base64")  # type: ignore[misc]
    [plain] = await vectors(client, encoding_format="float")
    assert numbers_of(base64.b64decode(text)) == plain  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
async def test_pooling_and_length_can_be_chosen(
    client: httpx.AsyncClient, pooling: str, normalize: bool
) -> None:
    asked = {"pooling": pooling, "normalize": normalize}
    assert await vectors(client, **asked) == [expected("abc", **asked)]


async def test_null_means_the_default(client: httpx.AsyncClient) -> None:
    names = ("dimensions", "encoding_format", "pooling", "normalize", "user", "timeout")
    nothing = dict.fromkeys((*names, "cache_salt", "priority"))
    assert await vectors(client, **nothing) == [expected("abc")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": None}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"dimensions": 256}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "abc"}, "prompt"),
        ({"stream": True}, "stream"),
        ({"timeout": 0}, "timeout"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": None}, "model"),
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    sent = {"model": "base", "input": "abc"} | body
    error = error_of(await client.post("/v1/embeddings", json=sent), 400)
    assert error["param"] == param
    assert param in error["message"] or "prompt" in error["message"]
    assert engine.running == set()


async def test_an_unknown_model_is_not_found(client: httpx.AsyncClient) -> None:
    sent = {"model": "nobody", "input": "abc"}
    error = error_of(await client.post("/v1/embeddings", json=sent), 404)
    assert error["code"] == "model_not_found"


async def test_the_engine_is_told_all(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"cache_salt": "x", "priority": 4, "pooling": "mean", "model": "shout"}
    await embed(client, **asked, input="ab")
    [request] = engine.requests
    assert request == EmbeddingRequest(
        prompt_token_ids=[97, 98],
        params=PoolingParams(pooling="mean"),
        model="shout",
        cache_salt="x",
        codec=engine.text.key,
        priority=4,
    )


async def test_an_embedding_that_fails_is_an_error(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error_after = 0
    sent = {"model": "base", "input": ["abc", "d"]}
    error = error_of(await client.post("/v1/embeddings", json=sent), 500)
    assert "NaN" in error["message"]
    assert engine.running == set()


async def test_one_that_takes_too_long_is_ended(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.tick_seconds = 10
    sent = {"model": "base", "input": ["abc", "d"], "timeout": 0.05}
    error = error_of(await client.post("/v1/embeddings", json=sent), 504)
    assert error["code"] == "deadline_exceeded"
    assert len(engine.aborted) == 2


def test_an_abandoned_call_aborts(live: str, engine: FakeEngine) -> None:
    engine.tick_seconds = 10
    sent = {"model": "base", "input": ["abc", "d"]}
    abandon(f"{live}/v1/embeddings", sent, lambda: len(engine.running) == 2)
    wait_until(lambda: len(engine.aborted) == 2)


async def test_metrics_count_it(client: httpx.AsyncClient) -> None:
    await embed(client, model="shout")
    lines = (await client.get("/metrics")).text.splitlines()
    assert 'loramux_http_requests_total{endpoint="/v1/embeddings",status="200"} 1.0' in lines
    assert 'loramux_request_seconds_count{endpoint="/v1/embeddings"} 1.0' in lines
    assert 'loramux_adapter_requests_total{adapter="shout"} 1.0' in lines


async def test_its_tokens_are_the_keys(engine: FakeEngine, clock: FakeClock) -> None:
    request = ("POST", "/v1/embeddings", {"model": "base", "input": ["a" * 20, "b" * 9]})
    async with serve(engine, limited("small", tokens_per_minute=30), clock=clock) as client:
        assert (await call(client, request, "small")).status_code == 200
        assert await used(client, "loramux_key_tokens_total") == {"small": 29}
        error_of(await call(client, request, "small"), 429)


async def test_keys_share_no_blocks(engine: FakeEngine) -> None:
    request = ("POST", "/v1/embeddings", {"model": "base", "input": "abc"})
    async with serve(engine, key("one"), key("two")) as client:
        for name in ("one", "two"):
            assert (await call(client, request, name)).status_code == 200
    assert [request.cache_salt for request in engine.requests] == ["one", "two"]


async def test_while_numbers_are_written_others_are_answered(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        many = asyncio.create_task(vectors(client, input=["abc"] * 300))
        assert (await client.get("/health")).status_code == 200
        assert await many == [expected("abc")] * 300


async def test_the_schema_is_described(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    post = document["paths"]["/v1/embeddings"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/EmbeddingsRequest"}
    properties = document["components"]["schemas"]["EmbeddingsRequest"]["properties"]
    assert {"input", "encoding_format", "pooling", "normalize", "priority"} <= properties.keys()
