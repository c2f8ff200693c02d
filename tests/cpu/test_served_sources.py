"""Sources through HTTP and the real engine: what a load that fails must leave as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux import LLM
from loramux.adapters.disk_cache import DiskCache
from loramux.adapters.sources import AdapterSources
from loramux.config import ServerOptions, SourceOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.server.app import create_app
from loramux.testing import random_adapter, tiny_model
from tests.cpu.engines import assemble_tiny, async_engine
from tests.remote_places import CONFIG, WEIGHTS, FileServer, Served, snapshot

pytestmark = pytest.mark.anyio

TARGETS = ("q_proj", "up_proj")


@dataclass
class Bench:
    """A server whose root is ``folder/root``, which may load from ``web`` as well."""

    client: httpx.AsyncClient
    engine: AsyncEngine
    web: FileServer
    folder: Path
    files: dict[str, bytes]
    """Of a good adapter, which also lies under ``root/good``."""

    async def load(self, source: str, **how: Any) -> httpx.Response:
        body = {"lora_name": "a", "lora_path": source, **how}
        return await self.client.post("/v1/load_lora_adapter", json=body)

    async def answer(self) -> str:
        body = {"model": "a", "prompt": "1 2 3", "temperature": 0, "max_tokens": 6}
        response = await self.client.post("/v1/completions", json=body)
        return response.raise_for_status().json()["choices"][0]["text"]

    async def state(self) -> tuple[object, list[str]]:
        """The adapters and all figures of the engine."""
        passing = ("loramux_http_requests", "vllm:lora_requests_info")
        adapters = (await self.client.get("/v1/adapters")).json()
        lines = (await self.client.get("/metrics")).text.splitlines()
        return adapters, [line for line in lines if not line.startswith(passing)]


@asynccontextmanager
async def running(folder: Path, seed: int = 1) -> AsyncIterator[Bench]:
    parts = assemble_tiny(tiny_model())
    root = folder / "root"
    random_adapter(root / "good", parts.worker.layout, rank=4, targets=TARGETS, seed=seed)
    files = {name: (root / "good" / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    engine = async_engine(
        parts, sources=AdapterSources(SourceOptions(disk_cache=str(folder / "cache")))
    )
    with FileServer().running() as web:
        options = ServerOptions(adapter_root=str(root), adapter_sources=(web.url,))
        await engine.start()
        transport = httpx.ASGITransport(create_app(engine, options=options))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield Bench(client, engine, web, folder, files)
        await engine.stop()
        parts.core.adapters.check()


async def test_local_and_remote_are_one_adapter(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.web.put("/good/", bench.files)
        assert (await bench.load("good")).status_code == 200
        [local] = await bench.engine.adapters()
        expected = await bench.answer()
        response = await bench.load(f"{bench.web.url}/good/?key=secret", load_inplace=True)
        assert response.status_code == 200
        [remote] = await bench.engine.adapters()
        assert remote.adapter_id == local.adapter_id
        assert remote.source == f"{bench.web.url}/good/"
        assert await bench.answer() == expected


FAULTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "missing": ({"status": 404}, 404, "adapter_source_not_found"),
    "denied": ({"status": 401}, 502, "adapter_source_unavailable"),
    "broken": ({"status": 500}, 502, "adapter_source_unavailable"),
    "cut": ({"break_after": 100}, 502, "adapter_source_unavailable"),
    "web_page": ({"data": b"<html><title>Oops"}, 400, "adapter_refused"),
    "pointer": ({"data": b"version https://git-lfs.github.com/spec/v1\n"}, 400, "adapter_refused"),
    "empty": ({"data": b""}, 400, "adapter_refused"),
    "garbage": ({"data": b"\xff" * 400}, 400, "adapter_refused"),
}


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_failed_load_leaves_everything_and_a_good_one_follows(
    tmp_path: Path, fault: str, replaced: bool
) -> None:
    change, status, code = FAULTS[fault]
    async with running(tmp_path) as bench:
        url = f"{bench.web.url}/x/"
        if replaced:
            assert (await bench.load("good")).status_code == 200
            await bench.answer()
        for name in (CONFIG, WEIGHTS) if fault == "missing" else (WEIGHTS,):
            bench.web.files[f"/x/{name}"] = Served(**{"data": bench.files[name], **change})
        if fault != "missing":
            bench.web.put("/x/", {CONFIG: bench.files[CONFIG]})
        before = await bench.state()
        response = await bench.load(url, load_inplace=replaced)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert await bench.state() == before
        if replaced:
            await bench.answer()
        bench.web.put("/x/", bench.files)
        assert (await bench.load(url, load_inplace=replaced)).status_code == 200
        assert await bench.answer()
        DiskCache(tmp_path / "cache", 0).check()


@pytest.mark.parametrize(
    "source",
    ["../outside", "{root}/good", "link", "linked-file", "http://169.254.169.254/a/", "hf:org/x"],
)
async def test_forbidden_sources_change_nothing(tmp_path: Path, source: str) -> None:
    async with running(tmp_path) as bench:
        root = tmp_path / "root"
        (tmp_path / "outside").mkdir()
        for name, data in bench.files.items():
            (tmp_path / "outside" / name).write_bytes(data)
        (root / "link").symlink_to("../outside")
        (root / "linked-file").mkdir()
        (root / "linked-file" / CONFIG).write_bytes(bench.files[CONFIG])
        (root / "linked-file" / WEIGHTS).symlink_to(f"../../outside/{WEIGHTS}")
        before = await bench.state()
        response = await bench.load(source.format(root=root))
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "adapter_source_forbidden"
        assert await bench.state() == before
        assert not (tmp_path / "cache").exists()


async def test_requests_go_on_while_many_sources_are_slow(tmp_path: Path) -> None:
    """More than there are threads to tokenize prompts."""
    async with running(tmp_path) as bench:
        assert (await bench.load("good")).status_code == 200
        bench.web.put("/x/", bench.files)
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)

        bench.web.files[f"/x/{WEIGHTS}"].wait = wait
        loads = [
            asyncio.create_task(bench.load(f"{bench.web.url}/x/?{i}", lora_name=f"b{i}"))
            for i in range(40)
        ]
        while not bench.web.asked:
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert await asyncio.wait_for(bench.answer(), 20)
        assert not any(load.done() for load in loads)
        gate.set()
        assert {(await load).status_code for load in loads} == {200}


def test_llm_takes_remote_sources_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    parts = assemble_tiny(tiny_model())
    random_adapter(tmp_path / "a", parts.worker.layout, rank=4, targets=TARGETS, seed=1)
    with FileServer().running() as web:
        files = {name: (tmp_path / "a" / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        web.put("/a/", files)
        llm = LLM.over(parts, {"near": str(tmp_path / "a"), "far": f"{web.url}/a/"})
    near, far = llm.adapters()
    assert near.adapter_id == far.adapter_id
    assert snapshot(tmp_path / "xdg" / "loramux" / "adapters")
