"""Server-sent events, and the end of work whose client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def event(data: dict[str, Any]) -> bytes:
    """One event. ASCII only: some clients split lines at U+2028 and its like."""
    return f"data: {_JSON.encode(data)}\n\n".encode()


class EventStreamResponse(Response):
    """Sends ``events`` as they come; calls ``on_close`` at the end, however it comes about.

    A client that has not read them until ``cut_off_at`` (of the event loop's clock) is left.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        cut_off_at: float,
    ) -> None:
        self._events = events
        self._on_close = on_close
        self._cut_off_at = cut_off_at
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._cut_off_at):
                await until_disconnect(receive, self._send_all(send))
        except TimeoutError:
            raise ClientDisconnect from None
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._events) as events:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it and raises ClientDisconnect when the client goes away.

    The request's body must have been read to its end.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
