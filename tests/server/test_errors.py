"""Every error has OpenAI's shape, the right status, and names the field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from loramux.config import ServerOptions
from loramux.errors import TooManyRequests
from loramux.server.app import create_app
from loramux.testing import FakeEngine, FakeStream
from loramux.types import GenerationRequest

pytestmark = pytest.mark.anyio

JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"colour": "red"}, "colour"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"model": 5}, "model"),
    ],
)
async def test_bad_value_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    body = {"model": "base", "prompt": "abc"} | body
    error = error_of(await client.post("/v1/completions", json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("field", ["model", "prompt"])
async def test_missing_field_is_named(client: httpx.AsyncClient, field: str) -> None:
    body = {"model": "base", "prompt": "abc"}
    del body[field]
    error = error_of(await client.post("/v1/completions", json=body), 400)
    assert error["param"] == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_number_that_is_not_finite_is_a_400(client: httpx.AsyncClient, number: str) -> None:
    content = f'{{"model": "base", "prompt": "abc", "temperature": {number}}}'
    response = await client.post("/v1/completions", content=content, headers=JSON)
    assert error_of(response, 400)["param"] == "temperature"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"model": "base",}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "open", "comma", "no utf-8", "lone surrogate", "deep", "long number"],
)
async def test_broken_json_is_a_400(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/v1/completions", content=content, headers=JSON)
    assert "not valid JSON" in error_of(response, 400)["message"]


@pytest.mark.parametrize("content", ["[]", '"text"', "null"])
async def test_body_that_is_no_object_is_a_400(client: httpx.AsyncClient, content: str) -> None:
    response = await client.post("/v1/completions", content=content, headers=JSON)
    assert "JSON object" in error_of(response, 400)["message"]


async def test_body_must_be_declared_as_json(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", content=b"{}")
    assert "Content-Type" in error_of(response, 415)["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_unknown_model_is_a_404(client: httpx.AsyncClient, path: str) -> None:
    body: dict[str, Any] = {"model": "nobody"}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body["prompt"] = "x"
    error = error_of(await client.post(path, json=body), 404)
    assert error["code"] == "model_not_found"
    assert "'nobody'" in error["message"]


async def test_unknown_route_is_a_404(client: httpx.AsyncClient) -> None:
    assert "/v2/completions" in error_of(await client.get("/v2/completions"), 404)["message"]


async def test_wrong_method_is_a_405(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


async def test_body_too_large_is_a_413(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": "a" * 10_000_000}
    error = error_of(await client.post("/v1/completions", json=body), 413)
    assert "--max-body-bytes" in error["message"]


async def test_body_without_a_length_is_counted_as_it_comes() -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b" " * 1000

    app = create_app(FakeEngine(), options=ServerOptions(max_body_bytes=10_000))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        response = await client.post("/v1/completions", content=chunks(), headers=JSON)
    error_of(response, 413)
    assert sent == 11_000


def test_large_body_gets_its_answer_over_a_real_connection(live: str) -> None:
    body = {"model": "base", "prompt": "a" * 10_000_000}
    error_of(httpx.post(f"{live}/v1/completions", json=body), 413)


async def test_failure_of_one_answer_is_a_500(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error_after = 1
    body = {"model": "base", "prompt": ["abc", "defg"]}
    error = error_of(await client.post("/v1/completions", json=body), 500)
    assert error["message"] == "the logits are NaN"
    assert engine.running == set()


async def test_dead_engine_is_a_503(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure = "out of memory"
    body = {"model": "base", "prompt": "abc"}
    error = error_of(await client.post("/v1/completions", json=body), 503)
    assert error["message"] == "out of memory"


async def test_full_queue_is_a_429(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def submit(request: GenerationRequest) -> FakeStream:
        raise TooManyRequests("9 requests wait: try again later")

    monkeypatch.setattr(engine, "submit", submit)
    body = {"model": "base", "prompt": "abc"}
    error = error_of(await client.post("/v1/completions", json=body), 429)
    assert error["type"] == "rate_limit_error"


async def test_fault_of_our_own_is_a_500_without_its_details(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def encode(text: str) -> list[int]:
        raise RuntimeError("secret")

    monkeypatch.setattr(engine.text, "encode", encode)
    response = await client.post("/v1/completions", json={"model": "base", "prompt": "abc"})
    error = error_of(response, 500)
    assert "secret" not in error["message"]
    assert response.headers["x-request-id"] in caplog.text
    assert "secret" in caplog.text
