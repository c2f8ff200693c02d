"""Models, health, version, metrics and request ids."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import httpx
import pytest

import loramux
from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine

pytestmark = pytest.mark.anyio


async def test_models_are_the_base_and_its_adapters(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    base, shout = answer["data"]
    assert (base["id"], base["parent"]) == ("base", None)
    assert (shout["id"], shout["parent"], shout["root"]) == ("shout", "base", "/adapters/shout")


async def test_one_model(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/shout")
    assert answer.json() == (await client.get("/v1/models")).json()["data"][1]


async def test_unknown_model_is_a_404(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/nobody")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_model_names_may_hold_slashes() -> None:
    app = create_app(FakeEngine("org/model"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        for name in ("org/model", "org%2Fmodel"):
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == "org/model"


async def test_served_name_replaces_the_engines_name() -> None:
    app = create_app(
        FakeEngine("/disk/model"), options=ServerOptions(served_model_name="assistant")
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        [base] = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], base["root"]) == ("assistant", "/disk/model")
        statuses = [
            (await client.post("/v1/completions", json={"model": m, "prompt": "a"})).status_code
            for m in ("assistant", "/disk/model")
        ]
    assert statuses == [200, 404]


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health")).status_code == 200
    engine.failure = "the device is lost"
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the device is lost"


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": loramux.__version__}


async def test_metrics_hold_the_engines_figures(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"model": "base", "prompt": "abc"})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    assert "loramux_prompt_tokens_total 3.0" in lines
    assert "loramux_output_tokens_total 3.0" in lines
    assert "loramux_requests_running 0.0" in lines
    assert "loramux_adapters 1.0" in lines
    assert "loramux_up 1.0" in lines


async def test_metrics_hold_latencies_by_endpoint(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": "abc", "n": 2, "stream": True}
    await client.post("/v1/completions", json=body)
    lines = (await client.get("/metrics")).text.splitlines()
    label = '{endpoint="/v1/completions"}'
    assert f"loramux_time_to_first_token_seconds_count{label} 1.0" in lines
    assert f"loramux_inter_token_seconds_count{label} 4.0" in lines
    assert f"loramux_request_seconds_count{label} 1.0" in lines


async def test_http_answers_are_counted_by_route_never_by_path(client: httpx.AsyncClient) -> None:
    await client.get("/v1/models/made-up-1")
    await client.get("/made-up-2")
    await client.post("/v1/completions", json={"model": "made-up-3", "prompt": "a"})
    text = (await client.get("/metrics")).text
    counted = re.findall(r'loramux_http_requests_total\{endpoint="(.*)",status="(.*)"\} 1.0', text)
    assert set(counted) == {
        ("/v1/models/{name:path}", "404"),
        ("other", "404"),
        ("/v1/completions", "404"),
    }
    assert "made-up" not in text


async def test_openapi_describes_the_bodies(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) <= set(schemas)
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
    assert schemas["CompletionRequest"]["required"] == ["model", "prompt"]
    chat = schemas["ChatRequest"]["properties"]
    assert {"tools", "tool_choice", "parallel_tool_calls"} <= chat.keys()
    assert schemas["Tool"]["required"] == ["type", "function"]
    assert "tool" in schemas["ChatMessage"]["properties"]["role"]["enum"]


def test_server_and_fakes_import_no_torch() -> None:
    program = (
        "import sys, loramux.server.app, loramux.server.listen, loramux.testing\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


async def test_two_apps_keep_their_metrics_apart() -> None:
    create_app(FakeEngine())
    create_app(FakeEngine())


async def test_request_id_is_taken_from_the_request(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions",
        json={"model": "base", "prompt": "a"},
        headers={"X-Request-Id": "trace-7"},
    )
    assert response.headers["x-request-id"] == "trace-7"
    assert response.json()["id"] == "cmpl-trace-7"


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "né", "<script>"])
async def test_request_id_that_is_not_sane_is_replaced(
    client: httpx.AsyncClient, given: str
) -> None:
    response = await client.get("/health", headers={"X-Request-Id": given.encode()})
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])


async def test_errors_carry_the_request_id_too(client: httpx.AsyncClient) -> None:
    response = await client.get("/nowhere", headers={"X-Request-Id": "trace-8"})
    assert response.headers["x-request-id"] == "trace-8"


def test_the_description_tells_of_errors_streams_and_keys() -> None:
    document = create_app(FakeEngine()).openapi()
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    for operation in operations.values():
        assert "422" not in operation["responses"]
        error = operation["responses"]["default"]["content"]["application/json"]["schema"]
        assert error == {"$ref": "#/components/schemas/Error"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert "text/event-stream" in operations["post", path]["responses"]["200"]["content"]
    assert list(operations["get", "/metrics"]["responses"]["200"]["content"]) == ["text/plain"]
    assert document["security"] == [{}, {"key": []}]


async def test_errors_have_the_shape_that_is_described(client: httpx.AsyncClient) -> None:
    schema = create_app(FakeEngine()).openapi()["components"]["schemas"]["Error"]
    wanted = schema["properties"]["error"]["required"]
    for path in ("/v1/models/nobody", "/nowhere"):
        assert list((await client.get(path)).json()["error"]) == wanted
