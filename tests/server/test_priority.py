"""Who may have a say in the order in which requests are served."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.server.keys import Key
from loramux.testing import FakeEngine
from tests.server.test_errors import error_of
from tests.server.test_keys import INFERENCE_CALLS, OPERATOR, call, ids, key, serve

pytestmark = pytest.mark.anyio

EDGES = (-(2**31), 2**31 - 1)


def with_priority(request: tuple[str, str, Any], priority: Any) -> tuple[str, str, Any]:
    method, path, body = request
    return method, path, body | {"priority": priority}


@pytest.fixture(params=INFERENCE_CALLS, ids=ids)
def request_(request: pytest.FixtureRequest) -> tuple[str, str, Any]:
    return request.param


@pytest.mark.parametrize("priority", [None, 0, -3, 7, *EDGES])
async def test_without_keys_everyone_may_say(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    request_: tuple[str, str, Any],
    priority: int | None,
) -> None:
    assert (await call(client, with_priority(request_, priority))).status_code == 200
    assert [request.priority for request in engine.requests] == [priority or 0]


async def test_an_admin_key_alone_changes_nothing_for_those_without_one(
    engine: FakeEngine, request_: tuple[str, str, Any]
) -> None:
    async with serve(engine, OPERATOR, open_inference=True) as client:
        assert (await call(client, with_priority(request_, -3))).status_code == 200
    assert [request.priority for request in engine.requests] == [-3]


@pytest.mark.parametrize("priority", [EDGES[0] - 1, EDGES[1] + 1, 1.5, "high", True])
async def test_what_is_no_priority_is_refused(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    request_: tuple[str, str, Any],
    priority: Any,
) -> None:
    response = await call(client, with_priority(request_, priority))
    assert error_of(response, 400)["param"] == "priority"
    assert engine.requests == []


PLAIN, URGENT, BATCH = key("plain"), key("urgent", min_priority=-5), key("b", min_priority=10)


@pytest.mark.parametrize(
    ("sender", "asked", "had"),
    [
        (PLAIN, None, 0),
        (PLAIN, 0, 0),
        (URGENT, None, 0),
        (URGENT, -5, -5),
        (URGENT, 99, 99),
        (BATCH, None, 10),
        (BATCH, 10, 10),
        (BATCH, 11, 11),
    ],
    ids=str,
)
async def test_a_key_may_say_what_the_operator_allows(
    engine: FakeEngine, request_: tuple[str, str, Any], sender: Key, asked: int | None, had: int
) -> None:
    async with serve(engine, PLAIN, URGENT, BATCH) as client:
        response = await call(client, with_priority(request_, asked), sender.name)
        assert response.status_code == 200
    assert [request.priority for request in engine.requests] == [had]


@pytest.mark.parametrize(
    ("sender", "asked", "words"),
    [
        (PLAIN, -1, "leave it out"),
        (PLAIN, 1, "leave it out"),
        (URGENT, -6, "send -5 or a higher number"),
        (BATCH, 0, "send 10 or a higher number"),
        (BATCH, 9, "send 10 or a higher number"),
    ],
    ids=str,
)
async def test_a_key_that_may_not_is_told(
    engine: FakeEngine, request_: tuple[str, str, Any], sender: Key, asked: int, words: str
) -> None:
    async with serve(engine, PLAIN, URGENT, BATCH) as client:
        response = await call(client, with_priority(request_, asked), sender.name)
    error = error_of(response, 403)
    assert (error["param"], error["type"]) == ("priority", "permission_error")
    assert sender.name in error["message"]
    assert words in error["message"]
    assert "min_priority" in error["message"]
    assert engine.requests == []
