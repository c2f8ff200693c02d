"""Around every request: its id, count, span and end, and the answer to a fault of our own."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.server import request_log
from loramux.server.errors import internal_error
from loramux.server.facts import Facts
from loramux.server.metrics import Metrics

if TYPE_CHECKING:
    from loramux.server.spans import Tracing

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Counted, never sent: nobody is left to read it."""


class RequestMiddleware:
    """Plain ASGI, so that streams and disconnects pass through untouched."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        access_log: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        """``access_log``: leave a line in the log for each request."""
        self._app = app
        self._metrics = metrics
        self._access_log = access_log
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        state = scope.setdefault("state", {})
        state["id"] = request_id
        facts = state["facts"] = Facts()
        status = 0
        began = time.perf_counter()
        span = None if self._tracing is None else self._tracing.begin(scope, request_id)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with ExitStack() as at_end:
            at_end.callback(request_log.request_id.reset, request_log.request_id.set(request_id))
            # What a handler takes for as long as its response runs, it gives back by a callback.
            state["at_end"] = at_end
            try:
                await self._app(scope, receive, send_with_id)
            except asyncio.CancelledError as error:
                facts.note_error(error)
                raise
            except ClientDisconnect as error:
                facts.note_error(error)
                status = CLIENT_CLOSED_REQUEST
            except Exception as error:
                facts.note_error(error)
                logger.exception("request %s failed", request_id)
                if status == 0:
                    await internal_error()(scope, receive, send_with_id)
                status = 500
            finally:
                endpoint = _endpoint(scope)
                self._metrics.count(endpoint, status)
                if facts.answer is not None and facts.adapter is not None:
                    self._metrics.count_tokens(facts.adapter, facts.answer.usage.computed_tokens)
                if span is not None:
                    span.end(facts, status)
                if self._access_log:
                    seconds = round(time.perf_counter() - began, 4)
                    request_log.log_request(scope["method"], endpoint, status, seconds)


def _request_id(given: str | None) -> str:
    """The caller's id if it is fit for logs and headers, else a new one."""
    if given is not None and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given):
        return given
    return uuid.uuid4().hex


def _endpoint(scope: Scope) -> str:
    """The path of the route, not of the request: clients must not be able to make up labels."""
    return getattr(scope.get("route"), "path", "other")
