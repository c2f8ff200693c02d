"""Which request a line of the log is about, and the line that each request leaves."""

from __future__ import annotations

import logging
from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Of the request that is being answered here; None elsewhere, as in the engine's thread."""

_access = logging.getLogger("loramux.access")


def log_request(method: str, endpoint: str, status: int, seconds: float) -> None:
    """One line for a request that has been answered; ``endpoint`` is a route, no client's text."""
    fields = {"method": method, "endpoint": endpoint, "status": status, "seconds": seconds}
    _access.info("%s %s %d in %.3f s", method, endpoint, status, seconds, extra={"fields": fields})
