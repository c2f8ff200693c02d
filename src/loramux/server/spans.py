"""OpenTelemetry spans of requests to models: one for each, and one for each stage of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from loramux.server.answer import Answer
from loramux.server.facts import Facts

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
}
"""Paths of requests to models, and what OpenTelemetry calls these."""
_CUT_OFF_SECONDS = 1.0
"""Requests that are cancelled take moments to end."""
_MAX_NAME = 256
"""Characters of a model's name: a client may write anything there."""


class Tracing:
    """Makes the spans of one server."""

    def __init__(self, tracer: Tracer, flush: Callable[[], Awaitable[None]]) -> None:
        """``flush`` sends what has not been sent, and is the last that is asked of the tracer."""
        self._tracer = tracer
        self._flush = flush
        self._open: set[RequestSpan] = set()
        # The headers of W3C alone: baggage is of no use here, and the SDK would log what is wrong
        # with a client's.
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, request_id: str) -> RequestSpan | None:
        """The span of a request that has just arrived; None for one that is not to a model."""
        operation = _OPERATIONS.get(scope["path"])
        if operation is None or scope["method"] != "POST":
            return None
        began = time.perf_counter()
        began_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(Headers(scope=scope), getter=_HEADERS),
            kind=SpanKind.SERVER,
            start_time=began_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "loramux",
                "gen_ai.request.id": request_id,
                "http.request.method": "POST",
                "http.route": scope["path"],
            },
        )
        request = RequestSpan(
            self._tracer, span, began=began, began_ns=began_ns, on_end=self._open.discard
        )
        self._open.add(request)
        return request

    async def stop(self) -> None:
        """Send all spans, those of requests too that the end of the server has just cut off."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_OFF_SECONDS):
                while self._open:
                    await asyncio.sleep(0.01)
        await self._flush()


class RequestSpan:
    """The span of one request, which ``end`` must end."""

    def __init__(
        self,
        tracer: Tracer,
        span: Span,
        *,
        began: float,
        began_ns: int,
        on_end: Callable[[RequestSpan], None],
    ) -> None:
        """``began`` by ``time.perf_counter``, as all times of an answer are; ``began_ns`` in Unix
        nanoseconds, as those of spans are."""
        self._tracer = tracer
        self._span = span
        self._began = began
        self._began_ns = began_ns
        self._on_end = on_end

    def end(self, facts: Facts, status: int) -> None:
        """End it now; ``status`` is the answer's as it is counted, 0 where there was none."""
        self._on_end(self)
        if not self._span.is_recording():
            return
        now = time.perf_counter()
        self._span.set_attributes(dict(_request_attributes(facts)))
        if status:
            self._span.set_attribute("http.response.status_code", status)
        error = facts.error or (str(status) if status >= 400 else None)
        if error is not None:
            self._span.set_attribute("error.type", error)
        # What a client has done wrong is no error of a server's span, but an answer that broke off
        # after its status is.
        if status >= 500 or (error is not None and status < 400):
            self._span.set_status(StatusCode.ERROR)
        if facts.answer is not None:
            self._span.set_attributes(dict(_answer_attributes(facts.answer, self._began)))
            for stage in _stages(facts.answer, now):
                self._add_stage(stage)
        self._span.set_attribute("gen_ai.latency.e2e", now - self._began)
        self._span.end(self._at(now))

    def _add_stage(self, stage: _Stage) -> None:
        context = set_span_in_context(self._span)
        start = self._at(stage.start)
        self._tracer.start_span(stage.name, context, start_time=start).end(self._at(stage.end))

    def _at(self, seconds: float) -> int:
        return self._began_ns + int((seconds - self._began) * 1e9)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Times are by ``time.perf_counter``."""

    name: str
    start: float
    end: float


def _stages(answer: Answer, now: float) -> Iterator[_Stage]:
    """What the sequence whose first token came first has gone through.

    The engine has a clock of its own and tells durations, so the moment at which the sequence
    started to run is right up to what it takes the engine to say that it has queued it.
    """
    if answer.waited is None:
        return
    first_token, last_token = answer.timer.first_token, answer.timer.last_token
    started = min(answer.submitted + answer.waited.queue_seconds, first_token or now)
    yield _Stage("queue", answer.submitted, started)
    if answer.waited.slot_seconds:
        since = max(answer.submitted, started - answer.waited.slot_seconds)
        yield _Stage("wait_for_adapter", since, started)
    if first_token is not None and last_token is not None:
        yield _Stage("prefill", started, first_token)
        yield _Stage("decode", first_token, last_token)


def _request_attributes(facts: Facts) -> Iterator[tuple[str, AttributeValue]]:
    if facts.model is not None:
        yield "gen_ai.request.model", facts.model[:_MAX_NAME]
        yield "gen_ai.request.stream", facts.stream
    if facts.params is not None:
        yield "gen_ai.request.temperature", facts.params.temperature
        yield "gen_ai.request.top_p", facts.params.top_p
        yield "gen_ai.request.choice.count", facts.params.n
        if facts.params.max_tokens is not None:
            yield "gen_ai.request.max_tokens", facts.params.max_tokens
    if facts.adapter is not None:
        yield "loramux.adapter", facts.adapter
    if facts.key is not None:
        yield "loramux.key", facts.key


def _answer_attributes(answer: Answer, began: float) -> Iterator[tuple[str, AttributeValue]]:
    usage = answer.usage
    yield "gen_ai.usage.input_tokens", usage.prompt_tokens
    yield "gen_ai.usage.output_tokens", usage.completion_tokens
    yield "gen_ai.usage.cache_read.input_tokens", usage.cached_tokens
    if answer.finish_reasons:
        reasons = [reason for _, reason in sorted(answer.finish_reasons.items())]
        yield "gen_ai.response.finish_reasons", reasons
    if answer.waited is not None:
        yield "gen_ai.latency.time_in_queue", answer.waited.queue_seconds
    if answer.timer.first_token is not None:
        yield "gen_ai.latency.time_to_first_token", answer.timer.first_token - began


class _Headers(Getter[Headers]):
    """A header may be there more than once."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        return carrier.getlist(key) or None

    def keys(self, carrier: Headers) -> list[str]:
        return carrier.keys()


_HEADERS = _Headers()
