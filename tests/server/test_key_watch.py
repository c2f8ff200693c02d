"""Keys that change while the server runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.server import key_watch
from loramux.server.app import create_app
from loramux.server.key_file import read_keys
from loramux.server.key_watch import KeyWatch, watching_keys
from loramux.server.keys import Keyring
from loramux.testing import FakeEngine
from tests.fake_clock import FakeClock

pytestmark = pytest.mark.anyio

ASK = {"model": "base", "prompt": "abc"}


def entry(name: str, *lines: str, secret: str | None = None) -> str:
    return "\n".join(["[[key]]", f'name = "{name}"', f'key = "sk-{secret or name}"', *lines, ""])


class Watched:
    """A file of keys, and who looks at it when a test says so."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self.path = path
        path.touch(mode=0o600)
        self.write(entry("a"), entry("b"))
        self.keyring = read_keys(str(path), {}, clock=clock)
        self.watch = KeyWatch(self.keyring, str(path), {})

    def write(self, *entries: str) -> None:
        self.path.write_text("".join(entries))

    async def settle(self) -> None:
        for _ in range(2):
            await self.watch.look()

    async def change(self, *entries: str) -> None:
        self.write(*entries)
        await self.settle()

    @property
    def names(self) -> list[str]:
        return [key.name for key in self.keyring.keys]


@pytest.fixture
def watched(tmp_path: Path, clock: FakeClock) -> Watched:
    return Watched(tmp_path / "keys.toml", clock)


@asynccontextmanager
async def serve(
    keyring: Keyring, engine: FakeEngine | None = None
) -> AsyncIterator[Callable[[str], Any]]:
    """Asks a server with these keys for an answer; gives its status."""
    transport = httpx.ASGITransport(create_app(engine or FakeEngine(), keyring=keyring))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(secret: str) -> int:
            headers = {"Authorization": f"Bearer sk-{secret}"}
            return (await client.post("/v1/completions", json=ASK, headers=headers)).status_code

        yield ask


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


# What changes


async def test_keys_that_are_gone_are_refused_and_new_ones_let_in(watched: Watched) -> None:
    async with serve(watched.keyring) as ask:
        assert [await ask(secret) for secret in "abc"] == [200, 200, 401]
        await watched.change(entry("b"), entry("c"))
        assert [await ask(secret) for secret in "abc"] == [401, 200, 200]


async def test_a_name_with_a_new_key_refuses_the_old_one(watched: Watched) -> None:
    async with serve(watched.keyring) as ask:
        await watched.change(entry("a", secret="other"))
        assert [await ask(secret) for secret in ("a", "other")] == [401, 200]


async def test_a_request_of_a_key_that_is_gone_finishes(watched: Watched) -> None:
    engine = FakeEngine(tick_seconds=0.02)
    async with serve(watched.keyring, engine) as ask:
        asking = asyncio.create_task(ask("a"))
        while not engine.running:
            await asyncio.sleep(0.001)
        await watched.change(entry("b"))
        assert await ask("a") == 401
        assert await asking == 200
    [account, _] = watched.keyring.accounts
    assert (account.name, account.in_flight, account.num_tokens) == ("a", 0, 6)


async def test_limits_that_change_hold_from_then_on(watched: Watched, clock: FakeClock) -> None:
    async with serve(watched.keyring) as ask:
        assert [await ask("a") for _ in range(3)] == [200] * 3
        await watched.change(entry("a", "requests_per_second = 1"), entry("b"))
        assert [await ask("a") for _ in range(2)] == [200, 429]
        await watched.change(entry("a", "requests_per_second = 1", "max_in_flight = 5"))
        assert await ask("a") == 429
        clock.now += 1.0
        assert await ask("a") == 200


async def test_rights_that_change_hold_from_then_on(watched: Watched) -> None:
    async with serve(watched.keyring) as ask:
        await watched.change(entry("a", 'adapters = ["none"]'), entry("b", "admin = true"))
        assert [await ask(secret) for secret in "ab"] == [404, 403]


async def test_an_account_goes_on_with_its_name(watched: Watched) -> None:
    [before, _] = watched.keyring.accounts
    before.enter()
    before.spend(100)
    await watched.change(entry("b"))
    await watched.change(entry("b"), entry("a", secret="other"))
    found = watched.keyring.find(b"sk-other")
    assert found is not None
    assert found.account is before
    assert (before.in_flight, before.num_requests, before.num_tokens) == (1, 1, 100)


async def test_counters_of_a_key_that_is_gone_are_still_told(watched: Watched) -> None:
    transport = httpx.ASGITransport(create_app(FakeEngine(), keyring=watched.keyring))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        watched.keyring.accounts[0].spend(7)
        await watched.change(entry("b"))
        text = (await client.get("/metrics")).text
    assert 'loramux_key_tokens_total{key="a"} 7.0' in text.splitlines()


async def test_keys_of_variables_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(entry("a"))
    environ = {"LORAMUX_ADMIN_KEY": "sk-admin", "LORAMUX_KEYS": str(path)}
    keyring = read_keys(None, environ)
    watch = KeyWatch(keyring, str(path), environ)
    path.write_text(entry("b"))
    for _ in range(2):
        await watch.look()
    assert [key.name for key in keyring.keys] == ["b", "LORAMUX_ADMIN_KEY"]


async def test_the_log_tells_what_is_new_by_names(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await watched.settle()
    assert caplog.text == ""
    await watched.change(entry("b", "admin = true"), entry("c"), entry("d"))
    assert "keys have been read again: added c, d; gone a; changed b" in caplog.text
    assert "sk-" not in caplog.text
    assert hashlib.sha256(b"sk-c").hexdigest() not in caplog.text


# When it is looked at


async def test_a_file_that_stays_as_it_is_is_read_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    load = key_watch.load_keys
    monkeypatch.setattr(key_watch, "load_keys", lambda *args: reads.append(1) or load(*args))
    for _ in range(10):
        await watched.watch.look()
    assert len(reads) == 1


async def test_a_change_since_the_server_has_read_it_is_found(watched: Watched) -> None:
    watched.write(entry("c"))
    await watched.settle()
    assert watched.names == ["c"]


async def test_a_file_that_is_being_written_is_left_alone_until_it_is_whole(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.settle()
    for text in ("", entry("b"), entry("b") + "[[key]]\nname = "):
        watched.write(text)
        await watched.watch.look()
        assert watched.names == ["a", "b"]
    await watched.change(entry("b"), entry("c"))
    assert watched.names == ["b", "c"]
    assert errors(caplog) == []


async def test_who_asks_has_it_read_at_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loramux")
    await watched.settle()
    watched.write(entry("c"))
    watched.watch.ask()
    await watched.watch.look()
    assert watched.names == ["c"]
    caplog.clear()
    watched.watch.ask()
    await watched.watch.look()
    assert "keys have been read again: nothing is new" in caplog.text


async def test_the_disk_is_touched_outside_the_event_loop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    for name in ("_state_of", "load_keys"):
        real = getattr(key_watch, name)

        def noted(*args: Any, real: Callable[..., Any] = real) -> Any:
            threads.append(threading.current_thread())
            return real(*args)

        monkeypatch.setattr(key_watch, name, noted)
    await watched.settle()
    assert len(threads) == 3
    assert threading.current_thread() not in threads


async def test_links_that_are_swapped_as_kubernetes_does_are_followed(tmp_path: Path) -> None:
    """keys.toml -> ..data/keys.toml, ..data -> a folder with a date, replaced by renaming."""

    def put(version: str, text: str) -> None:
        folder = tmp_path / version
        folder.mkdir()
        (folder / "keys.toml").touch(mode=0o440)
        (folder / "keys.toml").chmod(0o600)
        (folder / "keys.toml").write_text(text)
        (tmp_path / "..data_tmp").symlink_to(version)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    put("..2024_1", entry("a"))
    path = tmp_path / "keys.toml"
    path.symlink_to("..data/keys.toml")
    keyring = read_keys(str(path), {})
    watch = KeyWatch(keyring, str(path), {})
    for version, name in (("..2024_2", "b"), ("..2024_3", "c")):
        put(version, entry(name))
        for _ in range(2):
            await watch.look()
        assert [key.name for key in keyring.keys] == [name]


async def test_the_same_length_at_the_same_time_in_another_file_is_a_change(
    watched: Watched, tmp_path: Path
) -> None:
    await watched.settle()
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(entry("a") + entry("c"))
    before = watched.path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(watched.path)
    assert watched.path.stat().st_size == before.st_size
    await watched.settle()
    assert watched.names == ["a", "c"]


# What goes wrong


@pytest.mark.parametrize(
    "text", ["", "nonsense", entry("a", "rate = 5"), entry("a") + entry("a", secret="x")]
)
async def test_a_file_that_cannot_be_used_leaves_the_old_keys_in_force(
    watched: Watched, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    async with serve(watched.keyring) as ask:
        await watched.change(text)
        assert [await ask(secret) for secret in "ab"] == [200, 200]
    [error] = errors(caplog)
    assert str(watched.path) in error or "two keys have the name" in error
    assert "keys that were read before stay in force" in error
    assert "sk-" not in error


@pytest.mark.parametrize("mode", [0o644, 0o602])
async def test_a_file_that_is_too_open_leaves_the_old_keys_in_force(
    watched: Watched, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    watched.write(entry("c"))
    watched.path.chmod(mode)
    await watched.settle()
    assert watched.names == ["a", "b"]
    assert "chmod" in errors(caplog)[0]
    watched.path.chmod(0o600)
    await watched.settle()
    assert watched.names == ["c"]


async def test_a_file_that_is_gone_leaves_the_old_keys_in_force_until_it_is_back(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.settle()
    watched.path.unlink()
    for _ in range(5):
        await watched.watch.look()
    assert watched.names == ["a", "b"]
    assert len(errors(caplog)) == 1
    watched.path.touch(mode=0o600)
    await watched.change(entry("c"))
    assert watched.names == ["c"]


async def test_metrics_tell_whether_the_keys_are_current(watched: Watched) -> None:
    transport = httpx.ASGITransport(create_app(FakeEngine(), keyring=watched.keyring))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def told() -> dict[str, float]:
            lines = (await client.get("/metrics")).text.splitlines()
            prefix = "loramux_keys_last_reload_"
            found = [line.removeprefix(prefix).split() for line in lines if line.startswith(prefix)]
            return {name: float(value) for name, value in found}

        first = await told()
        await watched.change("nonsense")
        failed = await told()
        await watched.change(entry("a"))
        last = await told()
    assert [t["successful"] for t in (first, failed, last)] == [1, 0, 1]
    times = [t["success_timestamp_seconds"] for t in (first, failed, last)]
    assert times[0] == times[1] < times[2]


# In a server


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_watch, "_LOOK_SECONDS", 0.01)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("often")
async def test_changes_are_found_while_it_is_watched_and_not_after(watched: Watched) -> None:
    async with watching_keys(watched.keyring, str(watched.path), {}):
        watched.write(entry("c"))
        await until(lambda: watched.names == ["c"])
    watched.write(entry("d"))
    await asyncio.sleep(0.1)
    assert watched.names == ["c"]


async def test_sighup_has_it_read_now(watched: Watched) -> None:
    async with watching_keys(watched.keyring, None, {"LORAMUX_KEYS": str(watched.path)}):
        watched.write(entry("c"))
        signal.raise_signal(signal.SIGHUP)
        async with asyncio.timeout(0.9):
            await until(lambda: watched.names == ["c"])
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


async def test_without_a_file_sighup_keeps_its_meaning(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (None, str(pipe)):
        async with watching_keys(Keyring(open_inference=True), path, {}):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
