"""A server with a registry: what survives a restart, what two servers share, what may fail."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.adapters.registry import Record, Registry
from loramux.config import ServerOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.service import EngineService
from loramux.server.app import create_app
from loramux.testing import FakeWorker, expected_tokens
from loramux.types import SourceRules
from tests.unit.small_engine import SmallEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

PROMPT = [1, 2, 3]


@dataclass
class Server:
    client: httpx.AsyncClient
    small: SmallEngine
    reads: list[str]
    """Folders of adapters that were read."""

    async def add(self, name: str, source: str | None = None, **more: Any) -> httpx.Response:
        body = {"name": name, "source": source or name, **more}
        return await self.client.post("/v1/adapters", json=body)

    async def ask(self, model: str, prompt: str | list[int] | None = None) -> httpx.Response:
        body = {"model": model, "prompt": prompt or PROMPT, "temperature": 0, "max_tokens": 3}
        return await self.client.post("/v1/completions", json=body | {"return_token_ids": True})

    async def adapters(self) -> dict[str, dict[str, Any]]:
        data = (await self.client.get("/v1/adapters")).json()["data"]
        return {info["name"]: info for info in data}


@dataclass
class Place:
    """A folder with adapters and a registry, and what all servers on it have in common."""

    folder: Path
    adapter_bytes: dict[str, int] = field(default_factory=dict)
    vocab_sizes: dict[str, int] = field(default_factory=dict)

    @property
    def registry(self) -> Path:
        return self.folder / "registry.db"

    def records(self) -> dict[str, Record]:
        return {record.name: record for record in Registry(self.registry).records()}

    @asynccontextmanager
    async def server(
        self, *, at_start: Sequence[tuple[str, str]] = (), registry: Registry | None = None,
        **sizes: Any,
    ) -> AsyncIterator[Server]:  # fmt: skip
        reads: list[str] = []

        class Worker(FakeWorker):
            def read_adapter(self, name: str, directory: Path) -> Any:
                reads.append(directory.name)
                return super().read_adapter(name, directory)

        sizes = {
            "adapter_bytes": self.adapter_bytes,
            "vocab_sizes": self.vocab_sizes,
            "worker_type": Worker,
            **sizes,
        }
        small = SmallEngine(**sizes)
        service = EngineService(
            small.core,
            small.worker,
            small.admission,
            small.languages,
            base_name="base",
            max_open=100,
            adapters=[(name, str(self.folder / source)) for name, source in at_start],
            registry=registry or Registry(self.registry, busy_seconds=0.1),
        )
        engine = AsyncEngine(service)
        await engine.start()
        app = create_app(engine, options=ServerOptions(adapter_root=str(self.folder)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Server(client, small, reads)
        await engine.stop()
        assert "failed" not in (engine.failure or "")
        small.core.check()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for name in ("a", "b", "c", "big", "bad"):
        (tmp_path / name).mkdir()
    return Place(tmp_path)


def tokens(response: httpx.Response) -> list[int]:
    return response.raise_for_status().json()["choices"][0]["token_ids"]


async def test_names_survive_a_restart_and_are_read_when_they_are_needed(place: Place) -> None:
    async with place.server() as server:
        assert (await server.add("org/one", "a", pinned=True)).status_code == 201
        assert (await server.add("two", "b")).status_code == 201
        before = await server.adapters()
    async with place.server() as server:
        after = await server.adapters()
        assert server.reads == []
        assert {info["tier"] for info in after.values()} == {"source"}
        assert {n: i | {"tier": "host"} for n, i in after.items()} == before
        assert tokens(await server.ask("org/one")) == expected_tokens("a", PROMPT, 3)
        assert server.reads == ["a"]
        assert (await server.adapters())["org/one"]["tier"] == "slot"
        assert (await server.adapters())["two"]["tier"] == "source"


async def test_changes_survive_as_well(place: Place) -> None:
    async with place.server() as server:
        for name in ("one", "two", "three"):
            await server.add(name, "a")
        await server.client.delete("/v1/adapters/one")
        await server.client.patch("/v1/adapters/two", json={"pinned": True})
        await server.add("three", "b", load_inplace=True)
    async with place.server() as server:
        found = await server.adapters()
        assert {name: (i["adapter_id"], i["pinned"]) for name, i in found.items()} == {
            "two": ("a", True),
            "three": ("b", False),
        }


async def test_the_rules_of_a_source_survive(place: Place) -> None:
    async with place.server() as server:
        await server.add("one", "a")
    assert place.records()["one"].rules == SourceRules(root=str(place.folder))
    (place.folder / "a").rmdir()
    (place.folder / "a").symlink_to("/")
    async with place.server() as server:
        response = await server.ask("one")
        assert response.status_code == 500
        assert "is not allowed" in response.json()["error"]["message"]
        assert "is not allowed" in (await server.adapters())["one"]["last_error"]


async def test_other_weights_in_the_source_fail_the_request_alone(place: Place) -> None:
    async with place.server() as server:
        await server.add("one", "a")
        await server.add("two", "b")
    (place.folder / "a").rmdir()
    (place.folder / "a").symlink_to(place.folder / "c")
    async with place.server() as server:
        response = await server.ask("one")
        assert "holds another adapter now" in response.json()["error"]["message"]
        assert tokens(await server.ask("two")) == expected_tokens("b", PROMPT, 3)


async def test_an_adapter_of_another_size_than_recorded_is_not_trusted(place: Place) -> None:
    async with place.server() as server:
        await server.add("one", "a")
    place.adapter_bytes = {"a": 60}
    async with place.server(arena_bytes=50) as server:
        response = await server.ask("one")
        assert "takes 60 bytes, not 1" in response.json()["error"]["message"]
        response = await server.add("one", "a", load_inplace=True)
        assert "--device-cache 60" in response.json()["error"]["message"]
    place.adapter_bytes = {"a": 40}
    async with place.server(arena_bytes=50) as server:
        assert (await server.add("one", "a", load_inplace=True)).status_code == 201
        assert place.records()["one"].num_bytes == 40
        assert tokens(await server.ask("one")) == expected_tokens("a", PROMPT, 3)


async def test_a_tokenizer_is_there_before_the_first_text(place: Place) -> None:
    place.vocab_sizes = {"a": 104}
    async with place.server() as server:
        await server.add("one", "a")
        known = tokens(await server.ask("one", "\x01\x02\x03"))
    async with place.server() as server:
        assert (await server.adapters())["one"]["vocab_size"] == 104
        assert server.small.languages.known() == set()
        assert tokens(await server.ask("one", "\x01\x02\x03")) == known
        assert len(server.small.languages.known()) == 1
        assert server.reads == ["a"]


async def test_a_tokenizer_that_cannot_be_read_fails_the_request(place: Place) -> None:
    place.vocab_sizes = {"a": 104}
    async with place.server() as server:
        await server.add("one", "a")
    (place.folder / "a").rmdir()
    async with place.server() as server:
        response = await server.ask("one")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "adapter_source_not_found"
        last_error = (await server.adapters())["one"]["last_error"]
        assert last_error == response.json()["error"]["message"]
        (place.folder / "a").symlink_to(place.folder / "b")
        response = await server.ask("one")
        assert response.status_code == 400
        assert "holds another adapter now" in response.json()["error"]["message"]
        (place.folder / "a").unlink()
        (place.folder / "a").mkdir()
        tokens(await server.ask("one"))
        assert (await server.adapters())["one"]["last_error"] is None


async def test_names_of_the_command_line_stand_outside(place: Place) -> None:
    async with place.server() as server:
        await server.add("one", "a")
        await server.add("two", "a")
    before = place.records()
    async with place.server(at_start=[("one", "b"), ("three", "c")]) as server:
        assert tokens(await server.ask("one")) == expected_tokens("b", PROMPT, 3)
        await server.client.patch("/v1/adapters/one", json={"pinned": True})
        await server.add("three", "a", load_inplace=True)
        await server.client.delete("/v1/adapters/one")
        assert (await server.ask("one")).status_code == 404
    assert place.records() == before
    async with place.server() as server:
        assert tokens(await server.ask("one")) == expected_tokens("a", PROMPT, 3)


async def test_what_has_no_room_any_more_is_told_and_left_out(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.adapter_bytes = {"big": 60}
    async with place.server() as server:
        await server.add("one", "a", pinned=True)
        await server.add("huge", "big")
        await server.add("two", "b")
    before = place.records()
    async with place.server(num_slots=1, arena_bytes=50) as server:
        found = await server.adapters()
        assert {name: info["pinned"] for name, info in found.items()} == {
            "one": False,
            "two": False,
        }
        tokens(await server.ask("two"))
        tokens(await server.ask("one"))
    assert "without its pin" in caplog.text
    assert "--device-cache 60" in caplog.text
    assert place.records() == before


async def test_what_one_server_adds_the_other_serves_when_asked(place: Place) -> None:
    async with place.server() as first, place.server() as second:
        await first.add("one", "a")
        await first.add("two", "b")
        assert await second.adapters() == {}
        assert tokens(await second.ask("one")) == expected_tokens("a", PROMPT, 3)
        assert list(await second.adapters()) == ["one"]
        response = await second.add("two", "c")
        assert response.json()["error"]["code"] == "adapter_exists"
        response = await second.client.patch("/v1/adapters/two", json={"pinned": True})
        assert response.json()["pinned"] is True
        assert (await second.client.delete("/v1/adapters/one")).status_code == 200
        assert (await second.ask("one")).status_code == 404
        tokens(await first.ask("one"))  # until its restart
        assert (await second.ask("nobody")).status_code == 404
    assert list(place.records()) == ["two"]


CHANGES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/adapters", {"name": "new", "source": "b"}),
    ("POST", "/v1/adapters", {"name": "one", "source": "b", "load_inplace": True}),
    ("PATCH", "/v1/adapters/one", {"pinned": True}),
    ("DELETE", "/v1/adapters/one", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_a_locked_registry_fails_the_call_alone(
    place: Place, method: str, path: str, body: dict[str, Any] | None
) -> None:
    async with place.server() as server:
        await server.add("one", "a")
        before = (place.records(), await server.adapters())
        other = sqlite3.connect(place.registry, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        response = await server.client.request(method, path, json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "registry_unusable"
        tokens(await server.ask("one"))
        other.execute("ROLLBACK")
        other.close()
        await assert_unchanged(server, place, before)
        response = await server.client.request(method, path, json=body)
        assert response.status_code < 300


class FullRegistry(Registry):
    """On a disk without room for one page more, once it is set up."""

    full = False

    def _connect(self) -> sqlite3.Connection:
        connection = super()._connect()
        if self.full:
            connection.execute("PRAGMA max_page_count = 1")
        return connection


async def test_a_full_disk_fails_the_call_alone(place: Place) -> None:
    registry = FullRegistry(place.registry)
    async with place.server(registry=registry) as server:
        await server.add("one", "a")
        registry.full = True
        before = (place.records(), await server.adapters())
        response = await server.add("n" * 100_000, "b")
        assert response.status_code == 503
        assert "no room" in response.json()["error"]["message"]
        await assert_unchanged(server, place, before)
        tokens(await server.ask("one"))


async def assert_unchanged(
    server: Server, place: Place, before: tuple[dict[str, Record], dict[str, Any]]
) -> None:
    records, adapters = before
    ignored = {"last_used", "tier", "slot"}
    now = await server.adapters()
    assert place.records() == records
    assert {n: {k: v for k, v in i.items() if k not in ignored} for n, i in now.items()} == {
        n: {k: v for k, v in i.items() if k not in ignored} for n, i in adapters.items()
    }


async def test_what_the_engine_refuses_is_not_recorded(place: Place) -> None:
    place.adapter_bytes = {"big": 200}
    async with place.server() as server:
        await server.add("one", "a", pinned=True)
        before = (place.records(), await server.adapters())
        assert (await server.add("huge", "big")).status_code == 400
        assert (await server.add("wrong", "bad")).status_code == 400
        assert (await server.add("base", "b")).status_code == 400
        assert (await server.add("two", "b", pinned=True)).status_code == 400
        assert (await server.client.delete("/v1/adapters/nobody")).status_code == 404
        await assert_unchanged(server, place, before)


async def test_a_registry_that_has_gone_fails_unknown_names_alone(place: Place) -> None:
    async with place.server() as server:
        await server.add("one", "a")
        place.registry.unlink()
        tokens(await server.ask("one"))
        tokens(await server.ask("base"))
        response = await server.ask("nobody")
        assert response.status_code == 503
        assert str(place.registry) in response.json()["error"]["message"]
