"""Whether requests leave spans: where nobody asks for them, nothing of OpenTelemetry is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loramux.errors import MissingPackage

if TYPE_CHECKING:
    from loramux.server.spans import Tracing


def start_tracing(endpoint: str | None, environ: Mapping[str, str]) -> Tracing | None:
    """Spans for the collector at ``endpoint``, or none. Its ``stop`` must be awaited.

    Raises MissingPackage, or ConfigError for a variable of OpenTelemetry that cannot work.
    """
    if endpoint is None:
        return None
    try:
        from loramux.server.otlp import export_to
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-http"
        raise MissingPackage(package, "--otlp-traces-endpoint needs it") from error
    return export_to(endpoint, environ)
