"""Spans on their way to a collector: over real HTTP, and where it is away or slow."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from loramux.errors import ConfigError
from loramux.server import otlp
from loramux.server.app import create_app
from loramux.server.otlp import export_to
from loramux.testing import FakeEngine

pytestmark = pytest.mark.anyio

SECRET = "swordfish"
ASK = {"model": "base", "prompt": SECRET, "max_tokens": 3}


class Collector:
    """Takes spans at ``url``, each after ``delay`` seconds, with ``status``."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status = 200
        self.delay = 0.0
        self.requests: list[tuple[dict[str, str], ExportTraceServiceRequest]] = []

    def spans(self) -> list[Span]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, str]:
        [_, request] = self.requests[0]
        return {a.key: a.value.string_value for a in request.resource_spans[0].resource.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(collector.delay)
            if collector.status == 200:
                decoded = ExportTraceServiceRequest.FromString(body)
                assert self.path == "/v1/traces"
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.requests.append((headers, decoded))
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of one span, so that each request is sent at once."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")


async def ask(url: str, times: int = 1, environ: dict[str, str] | None = None) -> float:
    """Send requests to a server whose spans go to ``url``, and stop it; the longest's seconds."""
    tracing = export_to(url, environ or {})
    app, longest = create_app(FakeEngine(), tracing=tracing), 0.0
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        for _ in range(times):
            began = time.perf_counter()
            assert (await client.post("/v1/completions", json=ASK)).status_code == 200
            longest = max(longest, time.perf_counter() - began)
    await tracing.stop()
    return longest


async def test_spans_reach_a_collector_as_protobuf(collector: Collector) -> None:
    await ask(collector.url)
    assert collector.requests[0][0]["content-type"] == "application/x-protobuf"
    spans = {span.name: span for span in collector.spans()}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    span = spans["llm_request"]
    assert span.kind == Span.SPAN_KIND_SERVER
    assert all(s.parent_span_id == span.span_id for s in spans.values() if s is not span)
    told = {a.key: a.value for a in span.attributes}
    assert told["gen_ai.request.model"].string_value == "base"
    assert told["gen_ai.usage.output_tokens"].int_value == 3
    assert told["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert told["gen_ai.latency.e2e"].double_value > 0
    assert SECRET.encode() not in b"".join(r.SerializeToString() for _, r in collector.requests)


async def test_the_service_is_called_loramux(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    await ask(collector.url)
    resource = collector.resource()
    assert (resource["service.name"], resource["deployment.environment"]) == ("loramux", "test")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SERVICE_NAME", "mine"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")],
)
async def test_the_service_is_called_as_the_environment_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    await ask(collector.url)
    assert collector.resource()["service.name"] == "mine"


async def test_headers_of_the_environment_are_sent(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    await ask(collector.url)
    assert collector.requests[0][0]["x-team"] == "blue"


async def test_the_sdk_can_be_turned_off_by_its_variable(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    await ask(collector.url)
    assert collector.requests == []


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_BSP_SCHEDULE_DELAY", "-1")]
)
def test_a_variable_that_cannot_work_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="variable of OpenTelemetry"):
        export_to("http://localhost:1/v1/traces", {})


@pytest.mark.parametrize(
    "name", ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]
)
async def test_another_protocol_is_refused(collector: Collector, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*'grpc'"):
        export_to(collector.url, {name: "grpc"})
    await ask(collector.url, environ={name: "http/protobuf"})
    assert collector.spans()


# A collector that is away


async def test_a_collector_that_is_down_costs_requests_nothing_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
    monkeypatch.setattr(otlp, "_FLUSH_SECONDS", 2.0)  # more than one batch fails in this time
    with collecting() as gone:
        url = gone.url
    assert await ask(url, times=10) < 0.5
    line, last = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the last spans could not be sent" in last.getMessage()
    assert f"cannot be sent to {url}" in line.getMessage()
    assert "refused" in line.getMessage()


async def test_an_outage_is_told_again_after_the_collector_was_back(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loramux")
    tracing = export_to(collector.url, {})
    app = create_app(FakeEngine(), tracing=tracing)

    def told(words: str) -> bool:
        return words in caplog.text

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        for collector.status, words in (
            (401, "code: 401"),
            (200, "are sent to"),
            (404, "code: 404"),
        ):
            caplog.clear()
            for _ in range(3):
                await client.post("/v1/completions", json=ASK)
            await until(partial(told, words))
            assert caplog.text.count("loramux.server.otlp") == 1
    await tracing.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_slow_collector_costs_requests_nothing_and_loses_spans_with_one_line(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    collector.delay = 0.3
    monkeypatch.setattr(otlp, "_FLUSH_SECONDS", 2.0)
    assert await ask(collector.url, times=10) < 0.3
    [line] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "spans are lost before they are sent" in line.getMessage()
    assert 0 < len(collector.spans()) < 40


async def test_the_end_waits_for_a_collector_that_hangs_for_a_bounded_time(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "_FLUSH_SECONDS", 0.1)
    collector.delay = 1.0
    began = time.perf_counter()
    await ask(collector.url)
    assert time.perf_counter() - began < 0.8
    assert "could not be sent within 0.1 seconds" in caplog.text


async def test_the_end_sends_what_waits_for_its_batch(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "512")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    await ask(collector.url, times=3)
    assert len(collector.requests) == 1
    assert sum(span.name == "llm_request" for span in collector.spans()) == 3


async def test_headers_of_clients_that_are_odd_leave_no_line(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = export_to(collector.url, {})
    app = create_app(FakeEngine(), tracing=tracing)
    odd = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "no state" * 100,
        "baggage": "b" * 9000,
    }
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        assert (await client.post("/v1/completions", json=ASK, headers=odd)).status_code == 200
    await tracing.stop()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
