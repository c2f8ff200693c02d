"""The engine in a thread of its own, under an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from loramux.engine.adapters import read_adapter
from loramux.engine.admission import Admission
from loramux.engine.core import EngineCore
from loramux.engine.interface import EngineText, Worker
from loramux.errors import EngineStopped, TooManyRequests
from loramux.types import AdapterInfo, Delta, EngineStats, GenerationRequest, RequestId

log = logging.getLogger(__name__)

T = TypeVar("T")

_STALLED_WAIT = 0.01
"""Seconds to wait for news when there is work and none of it can run yet."""


class EngineStream:
    """One request's deltas, in an event loop."""

    def __init__(self, request_id: RequestId, num_completions: int, engine: AsyncEngine) -> None:
        self.request_id = request_id
        self._open = num_completions
        self._engine = engine
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self._open or not self._deltas.empty():
            delta = await self._deltas.get()
            yield delta

    def abort(self) -> None:
        """Stop the request wherever it is; its completions end with the reason ``abort``."""
        if self._open:
            self._engine.abort(self.request_id)

    def push(self, delta: Delta) -> bool:
        """Take a delta; whether more are to come."""
        self._open -= delta.finish_reason is not None
        self._deltas.put_nowait(delta)
        return self._open > 0


class AsyncEngine:
    """Implements ``engine.interface.Engine``.

    The event loop admits requests and reads adapters; a thread of the engine's own runs the steps
    and whatever else touches the core, one command at a time between two steps.
    """

    def __init__(
        self,
        core: EngineCore,
        worker: Worker,
        admission: Admission,
        text: EngineText,
        *,
        base_name: str,
        max_open: int,
        adapters: Sequence[tuple[str, str]] = (),
    ) -> None:
        """``adapters`` are names and sources to load at start; ``max_open`` bounds all requests."""
        self.base_name = base_name
        self.max_model_len = admission.limits.max_model_len
        self.text = text
        self._core = core
        self._worker = worker
        self._admission = admission
        self._max_open = max_open
        self._adapters_at_start = tuple(adapters)
        self._streams: dict[RequestId, EngineStream] = {}
        self._commands: queue.SimpleQueue[Callable[[], list[Delta] | None]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        return self._failure

    async def start(self) -> None:
        """Start the engine's thread and load the adapters named at start. Raises AdapterError."""
        assert self._thread is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="loramux-engine", daemon=True)
        self._thread.start()
        try:
            for name, source in self._adapters_at_start:
                await self.load_adapter(name, source)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all requests with the reason ``abort`` and the thread after its current step."""
        if self._thread is None or self._stopping:
            return
        for request_id in list(self._streams):
            self.abort(request_id)
        self._stopping = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        # What the thread delivered last is still on its way through the loop.
        await asyncio.sleep(0)

    def submit(self, request: GenerationRequest) -> EngineStream:
        """Raises RequestError, or EngineStopped when the engine is down."""
        self._check_alive()
        if len(self._streams) >= self._max_open:
            raise TooManyRequests(
                f"{len(self._streams)} requests run or wait, which is the limit: try again later"
            )
        if request.request_id in self._streams:
            raise TooManyRequests(f"a request with id {request.request_id!r} is still running")
        sequences = self._admission.admit(request)
        request_id = sequences[0].parent_id
        stream = EngineStream(request_id, len(sequences), self)
        self._streams[request_id] = stream
        self._post(lambda: self._core.add(sequences))
        return stream

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is; nothing happens if it has ended."""
        self._post(lambda: self._core.abort(request_id))

    async def load_adapter(
        self, name: str, source: str, *, load_inplace: bool = False, pinned: bool = False
    ) -> AdapterInfo:
        """Read, check and register an adapter while steps go on. Raises AdapterError."""
        self._check_alive()
        self._admission.catalog.check_name(name, replace=load_inplace)
        prepared = await asyncio.to_thread(read_adapter, self._worker, name, source)
        return await self._call(
            lambda: self._core.adapters.register(
                name, source, prepared, pinned=pinned, replace=load_inplace
            )
        )

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for a name; running ones finish. Raises UnknownAdapter."""
        self._check_alive()
        await self._call(lambda: self._core.adapters.unregister(name))

    def adapters(self) -> list[AdapterInfo]:
        return self._core.adapters.infos()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the engine has failed ({self._failure}): restart the server")
        if self._thread is None or self._stopping:
            raise EngineStopped("the engine is not running")

    # The event loop's side of the thread.

    def _post(self, command: Callable[[], list[Delta] | None]) -> None:
        self._commands.put(command)

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command in the engine's thread and wait for its result."""
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def settle(method: Callable[[Any], None], value: Any) -> None:
            if not future.done():  # the caller may have been cancelled
                method(value)

        def run() -> None:
            try:
                result = command()
            except Exception as error:
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, result)

        self._post(run)
        return await future

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and not stream.push(delta):
                del self._streams[delta.request_id]

    # The thread.

    def _run(self) -> None:
        while True:
            self._run_commands(wait=not self._core.has_work)
            if self._stopping and self._commands.empty():
                return
            if self._core.has_work and not self._step():
                self._run_command(timeout=_STALLED_WAIT)

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._run_command(timeout=None)
        while self._run_command(timeout=0.0):
            pass

    def _run_command(self, *, timeout: float | None) -> bool:
        try:
            command = self._commands.get(block=timeout != 0.0, timeout=timeout or None)
        except queue.Empty:
            return False
        self._send(command() or [])
        return True

    def _step(self) -> bool:
        """Run one step; whether anything could run."""
        steps = self._core.num_steps
        try:
            self._send(self._core.step())
        except Exception as error:
            # A step that dies half-way leaves the worker in an unknown state, so all must end.
            log.exception("the engine has failed")
            self._failure = f"{type(error).__name__}: {error}"
            self._send(self._core.fail_all(f"the engine has failed: {self._failure}"))
            return True
        return self._core.num_steps > steps

    def _send(self, deltas: list[Delta]) -> None:
        if deltas:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, deltas)
