"""What ``/metrics`` says of adapters, whatever they are called."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine

pytestmark = pytest.mark.anyio

ODD = ['quo"te', "back\\slash", "line\nbreak", "naïve/日本", "}{"]


@asynccontextmanager
async def served(engine: FakeEngine, **options: int) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, options=ServerOptions(**options))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        yield client


async def ask(client: httpx.AsyncClient, *models: str) -> None:
    for model in models:
        await client.post("/v1/completions", json={"model": model, "prompt": "a"})


async def samples(client: httpx.AsyncClient, name: str) -> list[Sample]:
    text = (await client.get("/metrics")).text
    found = [s for f in text_string_to_metric_families(text) for s in f.samples]
    return [sample for sample in found if sample.name == name]


async def requests(client: httpx.AsyncClient) -> dict[str, float]:
    found = await samples(client, "loramux_adapter_requests_total")
    return {sample.labels["adapter"]: sample.value for sample in found}


async def tokens(client: httpx.AsyncClient) -> dict[str, float]:
    found = await samples(client, "loramux_adapter_tokens_total")
    return {sample.labels["adapter"]: sample.value for sample in found}


async def test_requests_are_counted_by_adapter_whatever_it_is_called() -> None:
    async with served(FakeEngine(adapters=dict.fromkeys(ODD, "/a"))) as client:
        await ask(client, *ODD, ODD[0], "base", "nobody")
        assert await requests(client) == {name: 1 + (name == ODD[0]) for name in ODD}


async def test_labels_are_bounded() -> None:
    names = [f"tenant-{i}" for i in range(9)]
    async with served(FakeEngine(adapters=dict.fromkeys(names, "/a")), metrics_adapters=3) as c:
        await ask(c, *names, *names)
        assert await requests(c) == {"tenant-0": 2, "tenant-1": 2, "tenant-2": 2, "other": 12}


async def test_an_unloaded_adapter_leaves_its_label_to_another() -> None:
    engine = FakeEngine(adapters=dict.fromkeys("abc", "/a"))
    async with served(engine, metrics_adapters=2) as client:
        await ask(client, "a", "b", "c")
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        await ask(client, "c")
        assert await requests(client) == {"b": 1, "other": 1, "c": 1}


async def test_tokens_are_counted_by_the_same_labels() -> None:
    engine = FakeEngine(adapters=dict.fromkeys("abc", "/a"))
    async with served(engine, metrics_adapters=2) as client:
        for model, prompt in (("a", "xy"), ("b", "xyz"), ("c", "z"), ("base", "x")):
            body = {"model": model, "prompt": prompt, "stream": model == "b"}
            await client.post("/v1/completions", json=body)
        assert await tokens(client) == {"a": 4, "b": 6, "other": 2}
        await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert await tokens(client) == {"b": 6, "other": 2}


async def test_tokens_that_were_found_in_the_prefix_cache_are_not_counted() -> None:
    async with served(FakeEngine(adapters={"a": "/a"})) as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"model": "a", "prompt": "four"})
        assert await tokens(client) == {"a": 8 + 1 + 4}


async def test_an_adapter_called_other_breaks_nothing() -> None:
    async with served(FakeEngine(adapters={"other": "/a", "b": "/b"}), metrics_adapters=1) as c:
        await ask(c, "other", "b")
        await c.post("/v1/unload_lora_adapter", json={"lora_name": "other"})
        await ask(c, "b")
        assert await requests(c) == {"other": 2, "b": 1}


async def test_no_labels_at_all() -> None:
    async with served(FakeEngine(adapters={"a": "/a"}), metrics_adapters=0) as client:
        await ask(client, "a")
        assert await requests(client) == {"other": 1}


async def test_gauge_for_routers_is_that_of_vllm() -> None:
    engine = FakeEngine()
    engine.running_adapters, engine.waiting_adapters = ("a", "b"), ("c",)
    async with served(engine) as client:
        [sample] = await samples(client, "vllm:lora_requests_info")
    assert sample.labels == {
        "max_lora": "8",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "c",
    }
    assert abs(sample.value - time.time()) < 60


async def test_a_name_with_a_comma_cannot_pose_as_others() -> None:
    engine = FakeEngine()
    engine.running_adapters = (*ODD, "a,b")
    async with served(engine) as client:
        [sample] = await samples(client, "vllm:lora_requests_info")
    assert sample.labels["running_lora_adapters"] == ",".join(ODD)


async def test_histograms_add_up() -> None:
    async with served(FakeEngine(adapters={"a": "/a", "b": "/b"})) as client:
        buckets = await samples(client, "loramux_adapter_read_seconds_bucket")
        assert [(s.labels["le"], s.value) for s in buckets] == [("1.0", 2.0), ("+Inf", 2.0)]
        finds = await samples(client, "loramux_adapter_finds_total")
        assert {s.labels["tier"] for s in finds} == {"slot", "host", "source"}
