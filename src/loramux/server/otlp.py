"""Sends spans to a collector by OTLP over HTTP, from a thread that no request waits for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from loramux import __version__
from loramux.errors import ConfigError
from loramux.server.spans import Tracing

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
"""At the end of the server, for spans that have not been sent."""
_PROTOCOL = "http/protobuf"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = "opentelemetry.exporter"
_SDK = "opentelemetry.sdk"


def export_to(endpoint: str, environ: Mapping[str, str]) -> Tracing:
    """Spans for the collector at ``endpoint``, which need not be up.

    ``environ`` is that of the process, where the SDK reads its variables by itself. Raises
    ConfigError for one that cannot work.
    """
    protocol = next((environ[name] for name in _PROTOCOL_VARIABLES if environ.get(name)), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise ConfigError(
            f"{' or '.join(_PROTOCOL_VARIABLES)} is {protocol!r}, and spans are sent by "
            f"{_PROTOCOL} alone: unset it, and name the collector's HTTP port"
        )
    log = _SdkLog(endpoint)
    try:
        # The SDK's own end waits for a collector longer than a server that is to stop has time.
        provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        exporter = _ToldExporter(OTLPSpanExporter(endpoint), log)
        processor = BatchSpanProcessor(exporter)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"a variable of OpenTelemetry cannot be used: {error}") from error
    provider.add_span_processor(processor)
    log.take_over()
    logger.info("spans of requests go to %s", endpoint)

    def shut_down() -> None:
        provider.shutdown()
        log.give_back()

    async def flush() -> None:
        # Daemons, this one and the SDK's: what hangs in a collector must not keep the process.
        flushing = threading.Thread(target=shut_down, daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, _FLUSH_SECONDS)
        if flushing.is_alive():
            logger.warning("the last spans could not be sent within %g seconds", _FLUSH_SECONDS)
            exporter.shutdown()

    return Tracing(provider.get_tracer("loramux", __version__), flush)


def _resource() -> Resource:
    """What the variables say of this process, which is called loramux where they have no name."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: "loramux"}))
    return resource


class _ToldExporter(SpanExporter):
    """An exporter whose successes the log is told, and which may be shut down at any time."""

    def __init__(self, exporter: SpanExporter, log: _SdkLog) -> None:
        self._exporter = exporter
        self._log = log
        self._is_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_down:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._log.note_success()
        return result

    def shutdown(self) -> None:
        if not self._is_down:
            self._is_down = True
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _SdkLog(logging.Handler):
    """Takes what the SDK logs while it works, and tells once what it tells of every batch.

    What else the SDK says is about odd headers of clients, and not worth a line.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._is_away = False
        self._has_dropped = False
        self._logger = logging.getLogger("opentelemetry")

    def take_over(self) -> None:
        self._logger.addHandler(self)
        self._logger.propagate = False

    def give_back(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(_EXPORTERS) and not self._is_away:
            self._is_away = True
            logger.warning(
                "spans cannot be sent to %s, and are lost until they can: %s",
                self._endpoint,
                record.getMessage(),
            )
        elif record.name.startswith(_SDK) and not self._has_dropped:
            self._has_dropped = True
            logger.warning("spans are lost before they are sent: %s", record.getMessage())

    def note_success(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("spans are sent to %s again", self._endpoint)
