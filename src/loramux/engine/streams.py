"""Deltas as they come from an engine's thread or process, sorted into the streams of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from loramux.errors import InvalidRequest
from loramux.types import Delta, RequestId

Abort = Callable[[RequestId], None]


class EngineStream:
    """One request's deltas, in an event loop."""

    def __init__(self, request_id: RequestId, num_completions: int, abort: Abort) -> None:
        self.request_id = request_id
        self._open = set(range(num_completions))
        self._abort = abort
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._open or not self._deltas.empty():
            yield await self._deltas.get()

    def abort(self) -> None:
        """Stop the request wherever it is; its completions end with the reason ``abort``."""
        if self._open:
            self._abort(self.request_id)

    def push(self, delta: Delta) -> bool:
        """Take a delta; whether more are to come."""
        if delta.finish_reason is not None:
            self._open.remove(delta.index)
        self._deltas.put_nowait(delta)
        return bool(self._open)

    def fail(self, error: str) -> None:
        """End every completion that is still open."""
        for index in sorted(self._open):
            self.push(Delta(self.request_id, index, "", (), finish_reason="error", error=error))


class Streams:
    """The streams of all requests that have not ended."""

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._streams: dict[RequestId, EngineStream] = {}

    def open(self, request_id: RequestId, num_completions: int) -> EngineStream:
        """Raises InvalidRequest for an id that another request still has."""
        if request_id in self._streams:
            raise InvalidRequest(
                f"a request with the id {request_id!r} is still running: choose another one or "
                "none",
                "request_id",
            )
        stream = EngineStream(request_id, num_completions, self._abort)
        self._streams[request_id] = stream
        return stream

    def drop(self, request_id: RequestId) -> None:
        """Forget a stream that nobody will read."""
        self._streams.pop(request_id, None)

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Those of streams that have been dropped are lost."""
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and not stream.push(delta):
                del self._streams[delta.request_id]

    def fail(self, error: str) -> None:
        """End all of them."""
        streams: Iterable[EngineStream] = self._streams.values()
        for stream in streams:
            stream.fail(error)
        self._streams.clear()
