"""Spans of requests: their shape, what is in them and what must not be."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from loramux.config import ServerOptions
from loramux.errors import ConfigError, MissingPackage
from loramux.server.app import create_app
from loramux.server.keys import Keyring
from loramux.server.spans import Tracing
from loramux.server.tracing import start_tracing
from loramux.testing import FakeEngine
from loramux.types import Waited
from tests.server.conftest import serving
from tests.server.test_disconnect import wait_until
from tests.server.test_keys import bearer, limited, secret_of

pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "swordfish"
PATHS = ["/v1/completions", "/v1/chat/completions"]


class Spans:
    """What a server has ended, in the order of the ends."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))

        async def flush() -> None:
            provider.shutdown()

        self.tracing = Tracing(provider.get_tracer("test"), flush)

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def request(self) -> ReadableSpan:
        [span] = [span for span in self.all if span.name == "llm_request"]
        return span

    def stages(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.all if span.name != "llm_request"}


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(adapters={"shout": "/adapters/shout"})


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": SECRET}]}
    return {"model": "shout", **(chat if "chat" in path else {"prompt": SECRET}), **fields}


@asynccontextmanager
async def serve(
    engine: FakeEngine, spans: Spans, keyring: Keyring | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, tracing=spans.tracing, keyring=keyring)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


# Shape


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_server_span_with_what_was_asked_and_answered(
    engine: FakeEngine, spans: Spans, path: str, stream: bool
) -> None:
    body = body_for(path, stream=stream, max_tokens=4, temperature=0.5, top_p=0.75, n=2)
    async with serve(engine, spans) as client:
        response = await client.post(path, json=body, headers={"X-Request-Id": "mine-7"})
    assert response.status_code == 200
    span = spans.request
    assert (span.kind, span.parent, span.status.status_code) == (
        SpanKind.SERVER,
        None,
        StatusCode.UNSET,
    )
    found = attributes(span)
    times = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    num_prompt_tokens = len(engine.requests[0].prompt_token_ids)
    assert found == {
        "gen_ai.operation.name": "chat" if "chat" in path else "text_completion",
        "gen_ai.provider.name": "loramux",
        "gen_ai.request.id": "mine-7",
        "gen_ai.request.model": "shout",
        "gen_ai.request.stream": stream,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
        "loramux.adapter": "shout",
    }
    assert times.keys() == {
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.e2e",
    }
    assert 0 < times["gen_ai.latency.time_to_first_token"] <= times["gen_ai.latency.e2e"]
    assert span.start_time is not None
    assert span.end_time is not None
    lasted = (span.end_time - span.start_time) / 1e9
    assert lasted == pytest.approx(times["gen_ai.latency.e2e"], abs=1e-6)


async def test_what_a_request_leaves_out_is_not_made_up(engine: FakeEngine, spans: Spans) -> None:
    async with serve(engine, spans) as client:
        await client.post(PATHS[1], json=body_for(PATHS[1], model="base"))
    found = attributes(spans.request)
    assert found.keys().isdisjoint({"gen_ai.request.max_tokens", "loramux.adapter", "loramux.key"})
    assert "error.type" not in found


async def test_tokens_that_were_found_are_told(engine: FakeEngine, spans: Spans) -> None:
    async with serve(engine, spans) as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"model": "base", "prompt": "abcd"})
    found = [attributes(s) for s in spans.all if s.name == "llm_request"]
    assert [a["gen_ai.usage.cache_read.input_tokens"] for a in found] == [0, 3]


async def test_the_stages_of_an_answer_are_spans_below_it_and_follow_each_other(
    spans: Spans,
) -> None:
    engine = FakeEngine(adapters={"shout": "/adapters/shout"}, tick_seconds=0.02)
    engine.waited = Waited(0.010, 0.004)
    async with serve(engine, spans) as client:
        await client.post("/v1/completions", json=body_for("/v1/completions", max_tokens=3))
    request, stages = spans.request, spans.stages()
    assert stages.keys() == {"queue", "wait_for_adapter", "prefill", "decode"}
    assert request.context is not None
    for stage in stages.values():
        assert stage.parent is not None
        assert stage.parent.span_id == request.context.span_id
    queue, wait = lasts(stages["queue"]), lasts(stages["wait_for_adapter"])
    assert (queue, wait) == (pytest.approx(0.010, abs=1e-5), pytest.approx(0.004, abs=1e-5))
    assert stages["wait_for_adapter"].end_time == stages["queue"].end_time
    order = [stages[name] for name in ("queue", "prefill", "decode")]
    assert [a.end_time for a in order[:-1]] == [b.start_time for b in order[1:]]
    assert at(request.start_time) <= at(order[0].start_time)
    assert at(order[-1].end_time) <= at(request.end_time)
    assert lasts(stages["decode"]) >= 0.03
    assert attributes(request)["gen_ai.latency.time_in_queue"] == 0.010


def at(moment: int | None) -> int:
    assert moment is not None
    return moment


def lasts(span: ReadableSpan) -> float:
    return (at(span.end_time) - at(span.start_time)) / 1e9


async def test_a_wait_longer_than_the_clock_of_the_server_knows_ends_with_the_first_token(
    engine: FakeEngine, spans: Spans
) -> None:
    engine.waited = Waited(1000.0, 1000.0)
    async with serve(engine, spans) as client:
        await client.post("/v1/completions", json=body_for("/v1/completions"))
    assert all(0 <= lasts(stage) < 60 for stage in spans.stages().values())


async def test_a_request_that_had_its_slot_has_no_wait_for_it(
    engine: FakeEngine, spans: Spans
) -> None:
    async with serve(engine, spans) as client:
        await client.post("/v1/completions", json=body_for("/v1/completions"))
    assert spans.stages().keys() == {"queue", "prefill", "decode"}


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/tokenize", "/none"])
async def test_what_asks_no_model_for_an_answer_is_no_span(
    engine: FakeEngine, spans: Spans, path: str
) -> None:
    async with serve(engine, spans) as client:
        await client.get(path)
        await client.post(path, json={"prompt": "a"})
        await client.get("/v1/completions")
    assert spans.all == ()


# Errors


@pytest.mark.parametrize(
    ("fields", "status", "error", "is_fault"),
    [
        ({"max_tokens": 0}, 400, "InvalidRequest", False),
        ({"no_such_field": SECRET}, 400, "InvalidRequest", False),
        ({"model": "nobody"}, 404, "UnknownModel", False),
        ({"prompt": []}, 400, "InvalidRequest", False),
    ],
)
async def test_a_refused_request_tells_its_status_and_the_type_of_the_error(
    engine: FakeEngine,
    spans: Spans,
    fields: dict[str, Any],
    status: int,
    error: str,
    is_fault: bool,
) -> None:
    async with serve(engine, spans) as client:
        response = await client.post(PATHS[0], json=body_for(PATHS[0], **fields))
    assert response.status_code == status
    found = attributes(spans.request)
    assert (found["http.response.status_code"], found["error.type"]) == (status, error)
    assert spans.request.status.status_code is StatusCode.UNSET
    assert spans.request.events == ()


async def test_a_name_that_does_not_exist_is_told_up_to_a_length(
    engine: FakeEngine, spans: Spans
) -> None:
    async with serve(engine, spans) as client:
        await client.post(PATHS[0], json=body_for(PATHS[0], model="x" * 5000))
    assert attributes(spans.request)["gen_ai.request.model"] == "x" * 256
    assert "loramux.adapter" not in attributes(spans.request)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_breaks_off_is_a_fault(spans: Spans, stream: bool) -> None:
    engine = FakeEngine(error_after=2)
    async with serve(engine, spans) as client:
        body = {"model": "base", "prompt": "abcdef", "stream": stream}
        response = await client.post("/v1/completions", json=body)
    found = attributes(spans.request)
    assert found["error.type"] == "GenerationFailed"
    assert found["http.response.status_code"] == response.status_code == (200 if stream else 500)
    assert found["gen_ai.usage.output_tokens"] == 2
    assert spans.request.status.status_code is StatusCode.ERROR
    assert spans.request.status.description is None


async def test_a_fault_of_ours_tells_its_type_and_not_its_text(
    engine: FakeEngine, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(engine, "submit", broken)
    async with serve(engine, spans) as client:
        assert (await client.post(PATHS[0], json=body_for(PATHS[0]))).status_code == 500
    assert attributes(spans.request)["error.type"] == "RuntimeError"
    assert spans.request.status.status_code is StatusCode.ERROR


def test_a_client_that_goes_away_ends_its_span(spans: Spans) -> None:
    engine = FakeEngine(tick_seconds=0.01)
    endless = {"model": "base", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    with serving(create_app(engine, tracing=spans.tracing)) as url:
        body = endless | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: any(span.name == "llm_request" for span in spans.all))
    found = attributes(spans.request)
    assert (found["http.response.status_code"], found["error.type"]) == (499, "ClientDisconnect")
    assert found["gen_ai.usage.output_tokens"] >= 1
    assert "gen_ai.response.finish_reasons" not in found
    assert spans.request.status.status_code is StatusCode.UNSET


# What must not be in them


async def test_keys_are_told_by_their_names(engine: FakeEngine, spans: Spans) -> None:
    keyring = Keyring([limited("slow", requests_per_second=1)], open_inference=False)
    async with serve(engine, spans, keyring) as client:
        statuses = [
            (await client.post(PATHS[0], json=body_for(PATHS[0]), headers=bearer(name))).status_code
            for name in ("slow", "slow", "stranger")
        ]
    assert statuses == [200, 429, 401]
    requests = [attributes(span) for span in spans.all if span.name == "llm_request"]
    assert [found.get("loramux.key") for found in requests] == ["slow", "slow", None]
    errors = [found.get("error.type") for found in requests]
    assert errors == [None, "KeyLimitReached", "Unauthorized"]
    told = "".join(span.to_json() for span in spans.all)
    assert secret_of("slow") not in told
    assert secret_of("stranger") not in told


@pytest.mark.parametrize("path", PATHS)
async def test_no_text_of_a_request_or_an_answer_is_in_any_span(
    engine: FakeEngine, spans: Spans, path: str
) -> None:
    """With the text in each field that may hold some, and through each kind of end."""
    texts = {"stop": [SECRET], "user": SECRET, "cache_salt": SECRET}
    async with serve(engine, spans) as client:
        for fields in ({}, {"stream": True}, texts, {"max_tokens": SECRET}, {SECRET: 1}):
            await client.post(path, json=body_for(path, **fields))
        headers = {"baggage": f"a={SECRET}", "tracestate": f"v={SECRET}", "X-Other": SECRET}
        await client.post(path, json=body_for(path), headers=headers)
        await client.post(path, content=SECRET, headers={"Content-Type": "application/json"})
        await client.post(f"{path}?q={SECRET}", json=body_for(path))
        engine.error_after = 1
        await client.post(path, json=body_for(path))
    assert len([span for span in spans.all if span.name == "llm_request"]) == 9
    told = "".join(span.to_json() for span in spans.all).lower()
    assert SECRET not in told


# Parents and samples


async def test_the_span_of_the_caller_is_the_parent(engine: FakeEngine, spans: Spans) -> None:
    headers = [
        ("traceparent", f"00-{TRACE}-{PARENT}-01"),
        ("tracestate", "one=1"),
        ("tracestate", "two=2"),
    ]
    async with serve(engine, spans) as client:
        await client.post(PATHS[0], json=body_for(PATHS[0]), headers=headers)
    span = spans.request
    assert span.parent is not None
    assert span.context is not None
    assert (format(span.parent.span_id, "016x"), span.parent.is_remote) == (PARENT, True)
    assert {format(s.context.trace_id, "032x") for s in spans.all if s.context} == {TRACE}
    assert dict(span.context.trace_state) == {"one": "1", "two": "2"}


@pytest.mark.parametrize(
    "given", ["", "nonsense", f"00-{TRACE}", f"00-{'0' * 32}-{PARENT}-01", "é" * 2000]
)
async def test_a_header_that_names_no_parent_begins_a_trace(
    engine: FakeEngine, spans: Spans, given: str
) -> None:
    headers = {"traceparent": given.encode("latin-1")}
    async with serve(engine, spans) as client:
        response = await client.post(PATHS[0], json=body_for(PATHS[0]), headers=headers)
    assert response.status_code == 200
    assert spans.request.parent is None


async def test_a_caller_that_records_nothing_is_followed(engine: FakeEngine, spans: Spans) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    async with serve(engine, spans) as client:
        response = await client.post(PATHS[0], json=body_for(PATHS[0]), headers=headers)
    assert response.status_code == 200
    assert spans.all == ()


@pytest.mark.parametrize(
    ("sampler", "flags", "is_kept"),
    [
        ("always_off", "01", False),
        ("always_on", "00", True),
        ("parentbased_always_off", None, False),
        ("parentbased_always_off", "01", True),
    ],
)
async def test_the_sampler_of_the_environment_decides(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    flags: str | None,
    is_kept: bool,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    spans = Spans()
    headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
    async with serve(engine, spans) as client:
        await client.post(PATHS[0], json=body_for(PATHS[0]), headers=headers)
    assert bool(spans.all) is is_kept


# Without it


def test_without_the_option_nothing_that_makes_or_sends_spans_is_loaded() -> None:
    # FastAPI loads the API of OpenTelemetry by itself; the rest is what the extra brings.
    code = (
        "import sys\n"
        "import loramux.cli.serve\n"
        "import loramux.server.listen\n"
        "from loramux.server.app import create_app\n"
        "from loramux.testing import FakeEngine\n"
        "create_app(FakeEngine())\n"
        "ours = ('loramux.server.spans', 'loramux.server.otlp')\n"
        "sent = ('opentelemetry.sdk', 'opentelemetry.exporter', *ours)\n"
        "print([name for name in sys.modules if name.startswith(sent)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_package_the_option_says_what_to_install(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "loramux.server.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    options = ServerOptions(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    with pytest.raises(MissingPackage, match=r"pip install opentelemetry-exporter-otlp-proto-http"):
        create_app(engine, options=options)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "collector",
        "collector:4317",
        "grpc://collector:4317/",
        "http://collector:4318",
        "http:///v1",
    ],
)
def test_an_endpoint_that_is_no_whole_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"):
        ServerOptions(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [f"http://me:{SECRET}@host/v1/traces", f"http://host/v1?t={SECRET}", f"http://me:{SECRET}@h"],
)
def test_credentials_in_the_endpoint_are_refused_and_not_shown(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        ServerOptions(otlp_traces_endpoint=endpoint)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("endpoint", ["http://[::1]:4318/v1/traces", "https://otel.example/"])
def test_an_endpoint_may_be_any_place_of_http(endpoint: str) -> None:
    assert ServerOptions(otlp_traces_endpoint=endpoint).otlp_traces_endpoint == endpoint


async def test_a_server_that_stops_in_the_middle_ends_its_spans(
    spans: Spans,
) -> None:
    engine = FakeEngine(tick_seconds=0.01)
    endless = {"model": "base", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
    async with serve(engine, spans) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=endless))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert attributes(spans.request)["error.type"] == "CancelledError"
    assert spans.request.status.status_code is StatusCode.ERROR


def test_none_is_none() -> None:
    assert start_tracing(None, {}) is None


async def test_embeddings_have_a_span_too(engine: FakeEngine, spans: Spans) -> None:
    async with serve(engine, spans) as client:
        body = {"model": "shout", "input": [SECRET, "b"]}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    found = attributes(spans.request)
    assert found["gen_ai.operation.name"] == "embeddings"
    assert found["gen_ai.usage.input_tokens"] == len(SECRET) + 1
    assert found["loramux.adapter"] == "shout"
    assert SECRET not in str(found)
