"""Answers that are not complete in time, clients that do not read, and a server that is to stop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.types import Message

from loramux.config import ServerOptions
from loramux.server import body as body_module
from loramux.server.app import create_app
from loramux.server.sse import EventStreamResponse
from loramux.testing import FakeEngine
from tests.server.conftest import serving

ENDLESS = {"model": "base", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.anyio
@pytest.mark.parametrize("limit", ["field", "server", "shorter one"])
async def test_an_answer_that_takes_too_long_is_ended(limit: str) -> None:
    engine = FakeEngine(tick_seconds=0.01)
    seconds = {"field": (0.1, 60.0), "server": (None, 0.1), "shorter one": (30.0, 0.1)}[limit]
    options = ServerOptions(max_request_seconds=seconds[1])
    async with client_of(create_app(engine, options=options)) as client:
        answer = await client.post("/v1/completions", json=ENDLESS | {"timeout": seconds[0]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (504, "deadline_exceeded")
    assert "0.1 seconds" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert engine.running == set()
    assert len(engine.aborted) == 1


@pytest.mark.anyio
async def test_a_stream_tells_that_its_time_is_over() -> None:
    engine = FakeEngine(tick_seconds=0.01)
    body = ENDLESS | {"stream": True, "timeout": 0.1}
    async with client_of(create_app(engine)) as client:
        lines = (await client.post("/v1/completions", json=body)).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert len(lines) > 4, "what was made before is sent"
    assert engine.running == set()


@pytest.mark.anyio
async def test_a_deadline_holds_though_tokens_never_stop_coming() -> None:
    engine = FakeEngine(tick_seconds=0.0, max_model_len=10**7)
    body = ENDLESS | {"max_tokens": 10**6, "timeout": 0.2}
    async with client_of(create_app(engine)) as client, asyncio.timeout(20):
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 504


@pytest.mark.anyio
@pytest.mark.parametrize("timeout", [0, -1, "1"])
async def test_a_timeout_is_a_positive_number(client: httpx.AsyncClient, timeout: Any) -> None:
    answer = await client.post("/v1/completions", json=ENDLESS | {"timeout": timeout})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


def request_bytes(url: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection with little room for what is not read."""
    parts = urlsplit(url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect((parts.hostname or "", parts.port or 0))
        yield sock


@pytest.mark.anyio
async def test_a_client_that_does_not_read_is_left() -> None:
    closed: list[bool] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(True)

    async def send(message: Message) -> None:
        """A connection whose buffers are full."""
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    response = EventStreamResponse(
        events(),
        on_close=lambda: closed.append(False),
        cut_off_at=asyncio.get_running_loop().time() + 0.1,
    )
    async with asyncio.timeout(10):
        with pytest.raises(ClientDisconnect):
            await response({"type": "http"}, receive, send)
    assert closed == [True, False]


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_BODY_SECONDS", 0.2)
    with serving(create_app(FakeEngine())) as url, connected(url) as sock:
        sock.sendall(request_bytes(url, ENDLESS)[:-5])
        answer = sock.recv(10_000).decode()
        assert answer.startswith("HTTP/1.1 408")
        assert "connection: close" in answer.lower()


@pytest.mark.anyio
async def test_a_server_that_is_to_stop_takes_nothing_new(engine: FakeEngine) -> None:
    app = create_app(engine)
    async with client_of(app) as client:
        assert (await client.get("/ready")).status_code == 200
        app.state.context.stopping.set()
        ready = await client.get("/ready")
        answer = await client.post("/v1/completions", json=ENDLESS)
        assert (ready.status_code, answer.status_code) == (503, 503)
        assert "shutting down" in answer.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
    assert engine.requests == []


@pytest.mark.anyio
async def test_a_dead_engine_is_not_ready(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.failure = "out of memory"
    answer = await client.get("/ready")
    assert answer.status_code == 503
    assert "out of memory" in answer.json()["error"]["message"]
