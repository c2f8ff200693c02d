from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine
from loramux.types import SourceRules

pytestmark = pytest.mark.anyio

NEW = {"lora_name": "new", "lora_path": "/adapters/new"}


async def test_loaded_adapter_answers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/load_lora_adapter", json=NEW)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert "new" in response.text
    answer = await client.post("/v1/completions", json={"model": "new", "prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "A"


async def test_unloaded_adapter_is_gone(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/unload_lora_adapter", json={"lora_name": "shout"})
    assert response.status_code == 200
    answer = await client.post("/v1/completions", json={"model": "shout", "prompt": "a"})
    assert answer.status_code == 404


async def test_adapters_are_listed_with_their_state(client: httpx.AsyncClient) -> None:
    await client.post("/v1/load_lora_adapter", json=NEW | {"pinned": True})
    shout, new = (await client.get("/v1/adapters")).json()["data"]
    assert shout["name"] == "shout"
    assert new == {
        "name": "new",
        "adapter_id": new["adapter_id"],
        "source": "/adapters/new",
        "num_bytes": 1024,
        "max_rank": 8,
        "pinned": True,
        "slot": None,
        "vocab_size": None,
        "weight": None,
        "tier": "host",
        "in_flight": 0,
        "last_used": None,
        "last_error": None,
        "warnings": [],
    }


async def test_load_inplace_replaces(client: httpx.AsyncClient) -> None:
    body = NEW | {"lora_name": "shout"}
    response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "adapter_exists"
    response = await client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
    assert response.status_code == 200
    [shout] = (await client.get("/v1/adapters")).json()["data"]
    assert shout["source"] == "/adapters/new"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("load", NEW | {"lora_path": "missing"}, 404, "adapter_source_not_found"),
        ("load", NEW | {"lora_path": "bad"}, 400, "adapter_refused"),
        ("load", NEW | {"lora_name": "base"}, 400, "adapter_exists"),
        ("load", NEW | {"lora_name": ""}, 400, None),
        ("load", NEW | {"rank": 5}, 400, None),
        ("load", {"lora_name": "new"}, 400, None),
        ("unload", {"lora_name": "nobody"}, 404, "adapter_not_found"),
    ],
)
async def test_failed_calls_say_why(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    response = await client.post(f"/v1/{path}_lora_adapter", json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


async def test_refusal_gives_every_reason(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/load_lora_adapter", json=NEW | {"lora_path": "bad"})
    message = response.json()["error"]["message"]
    assert "layer 7 does not exist" in message
    assert "bias='all' is not supported" in message


async def test_served_name_of_the_base_cannot_be_taken() -> None:
    app = create_app(FakeEngine(), base_name="assistant")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        body = NEW | {"lora_name": "assistant"}
        response = await client.post("/v1/load_lora_adapter", json=body)
    assert response.json()["error"]["code"] == "adapter_exists"


async def load_from(
    host: str, engine: FakeEngine, headers: dict[str, str] | None = None
) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(engine), client=(host, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post("/v1/load_lora_adapter", json=NEW, headers=headers)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
async def test_admin_calls_from_this_machine_pass(host: str, engine: FakeEngine) -> None:
    assert (await load_from(host, engine)).status_code == 200


@pytest.mark.parametrize("host", ["10.0.0.5", "2001:db8::1", "::ffff:10.0.0.5", "strange"])
async def test_admin_calls_from_elsewhere_are_refused(host: str, engine: FakeEngine) -> None:
    response = await load_from(host, engine)
    assert response.status_code == 403
    assert "own machine" in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "permission_error"
    assert len(await engine.adapters()) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"Origin": "https://example.com"},
        {"Origin": "null"},
    ],
)
async def test_proxies_and_foreign_pages_are_not_this_machine(
    headers: dict[str, str], engine: FakeEngine
) -> None:
    assert (await load_from("127.0.0.1", engine, headers)).status_code == 403


async def test_local_page_may_load(engine: FakeEngine) -> None:
    headers = {"Origin": "http://localhost:8000"}
    assert (await load_from("127.0.0.1", engine, headers)).status_code == 200


async def test_everyone_may_generate(engine: FakeEngine) -> None:
    transport = httpx.ASGITransport(create_app(engine), client=("10.0.0.5", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert response.status_code == 200


async def test_rules_of_the_server_go_with_every_load() -> None:
    engine = FakeEngine()
    options = ServerOptions(adapter_root="/adapters", adapter_sources=("hf:org",))
    transport = httpx.ASGITransport(create_app(engine, options=options))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post("/v1/load_lora_adapter", json=NEW)
    assert engine.rules == [SourceRules(root="/adapters", prefixes=("hf:org",))]


ADD = {"name": "new", "source": "/adapters/new"}
ODD_NAMES = ["org/model", "/abs", "a//b", "naïve 日本", "what?#%", "trailing/", "a..b", "a,b"]


def url(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"


async def test_added_adapter_is_told_and_answers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/adapters", json=ADD | {"pinned": True})
    assert response.status_code == 201
    added = response.json()
    assert (added["name"], added["source"], added["pinned"]) == ("new", "/adapters/new", True)
    assert added == (await client.get("/v1/adapters")).json()["data"][1]
    answer = await client.post("/v1/completions", json={"model": "new", "prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "A"


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_names_of_any_kind_work_in_urls(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.post("/v1/adapters", json=ADD | {"name": name})).status_code == 201
    assert (await client.get(url(name))).json()["name"] == name
    response = await client.patch(url(name), json={"pinned": True})
    assert (response.status_code, response.json()["pinned"]) == (200, True)
    response = await client.delete(url(name))
    assert (response.status_code, response.json()) == (200, {"name": name, "deleted": True})
    assert (await client.get(url(name))).status_code == 404


async def test_slashes_in_urls_need_no_escape(client: httpx.AsyncClient) -> None:
    await client.post("/v1/adapters", json=ADD | {"name": "org/new"})
    assert (await client.get("/v1/adapters/org/new")).json()["name"] == "org/new"


async def test_pins_come_and_go(client: httpx.AsyncClient) -> None:
    for pinned in (True, False):
        response = await client.patch("/v1/adapters/shout", json={"pinned": pinned})
        assert response.json()["pinned"] is pinned
        assert (await client.get("/v1/adapters/shout")).json() == response.json()


async def test_a_pin_that_leaves_no_slot_is_refused(client: httpx.AsyncClient) -> None:
    for i in range(7):
        body = ADD | {"name": f"p{i}", "pinned": True}
        assert (await client.post("/v1/adapters", json=body)).status_code == 201
    response = await client.patch("/v1/adapters/shout", json={"pinned": True})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "adapter_refused"
    assert (await client.get("/v1/adapters/shout")).json()["pinned"] is False


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "", ADD | {"source": "missing"}, 404, "adapter_source_not_found"),
        ("POST", "", ADD | {"source": "bad"}, 400, "adapter_refused"),
        ("POST", "", ADD | {"name": "shout"}, 400, "adapter_exists"),
        ("POST", "", ADD | {"name": "base"}, 400, "adapter_exists"),
        ("POST", "", ADD | {"lora_name": "x"}, 400, None),
        ("POST", "", {"name": "new"}, 400, None),
        ("PATCH", "/shout", {}, 400, None),
        ("PATCH", "/shout", {"pinned": 1}, 400, None),
        ("PATCH", "/shout", {"pinned": True, "source": "x"}, 400, None),
        ("PATCH", "/nobody", {"pinned": True}, 404, "adapter_not_found"),
        ("GET", "/nobody", None, 404, "adapter_not_found"),
        ("DELETE", "/nobody", None, 404, "adapter_not_found"),
    ],
)
async def test_failed_calls_to_the_collection_say_why(
    client: httpx.AsyncClient,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    status: int,
    code: str | None,
) -> None:
    response = await client.request(method, f"/v1/adapters{path}", json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert len((await client.get("/v1/adapters")).json()["data"]) == 1


@pytest.mark.parametrize("method", ["POST", "PATCH", "DELETE"])
async def test_only_this_machine_may_change_the_collection(method: str, engine: FakeEngine) -> None:
    before = await engine.adapters()
    transport = httpx.ASGITransport(create_app(engine), client=("10.0.0.5", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        path = "/v1/adapters" if method == "POST" else "/v1/adapters/shout"
        body = ADD if method == "POST" else {"pinned": True}
        response = await client.request(method, path, json=body)
        assert response.status_code == 403
        assert (await client.get("/v1/adapters/shout")).status_code == 200
    assert await engine.adapters() == before


async def test_rules_go_with_every_addition() -> None:
    engine = FakeEngine()
    options = ServerOptions(adapter_root="/adapters")
    transport = httpx.ASGITransport(create_app(engine, options=options))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post("/v1/adapters", json=ADD)
    assert engine.rules == [SourceRules(root="/adapters")]
