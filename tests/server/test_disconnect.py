"""A client that goes away frees its request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from loramux.server.app import create_app
from loramux.testing import FakeEngine

ENDLESS = {"model": "base", "prompt": ["abc", "def"], "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tick_seconds=0.01)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def abandon(
    url: str,
    body: Mapping[str, Any],
    until: Callable[[], bool],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send a request, and go away without its answer as soon as ``until`` holds."""
    to = httpx.URL(url)
    connection = HTTPConnection(to.host, to.port)
    sent = {"content-type": "application/json", **(headers or {})}
    connection.request("POST", to.path, json.dumps(body), sent)
    try:
        wait_until(until)
    finally:
        connection.close()


def test_closed_stream_aborts(live: str, engine: FakeEngine) -> None:
    body = ENDLESS | {"stream": True}
    with httpx.stream("POST", f"{live}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert len(engine.running) == 2
    wait_until(lambda: len(engine.aborted) == 2)
    assert engine.running == set()


def test_abandoned_call_aborts(live: str, engine: FakeEngine) -> None:
    abandon(f"{live}/v1/completions", ENDLESS, lambda: len(engine.running) == 2)
    wait_until(lambda: len(engine.aborted) == 2)
    assert engine.running == set()


def test_abandoned_call_is_counted_as_499(live: str, engine: FakeEngine) -> None:
    abandon(f"{live}/v1/completions", ENDLESS, lambda: len(engine.running) == 2)
    line = 'loramux_http_requests_total{endpoint="/v1/completions",status="499"} 1.0'
    wait_until(lambda: line in httpx.get(f"{live}/metrics").text)


def test_finished_requests_are_not_aborted(live: str, engine: FakeEngine) -> None:
    for stream in (False, True):
        body = {"model": "base", "prompt": "ab", "stream": stream}
        assert httpx.post(f"{live}/v1/completions", json=body).status_code == 200
    assert engine.aborted == []
    assert engine.counts.finished == 2


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_is_gone_before_the_first_token_aborts(
    engine: FakeEngine, stream: bool
) -> None:
    """The app is driven by hand: the disconnect is there as soon as the body has been read."""
    messages = [
        {"type": "http.request", "body": json.dumps(ENDLESS | {"stream": stream}).encode()},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(create_app(engine)(scope, receive, send))
    assert len(engine.aborted) == 2
