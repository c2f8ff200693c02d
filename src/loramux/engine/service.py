"""The engine in a thread of its own, and whatever an event loop may ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from loramux.adapters.registry import Registry
from loramux.adapters.sources import AdapterSources
from loramux.engine.adapters import AdapterReader
from loramux.engine.admin import AdapterAdmin
from loramux.engine.admission import Admission
from loramux.engine.core import EngineCore
from loramux.engine.fetcher import Fetcher, Outcome
from loramux.engine.interface import Listener, TextCodec, Worker
from loramux.engine.languages import Languages
from loramux.engine.origins import Origin
from loramux.errors import EngineStopped, LoramuxError, TooManyRequests
from loramux.stats import EngineStats
from loramux.types import (
    AdapterInfo,
    Delta,
    EngineRequest,
    GenerationRequest,
    RequestId,
    SourceRules,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

Command = Callable[[], Sequence[Delta] | None]
"""Runs in the engine's thread between two steps; the deltas it gives rise to are delivered."""

_PAUSE_SECONDS = 0.1
"""Between the requests of one client there are pauses that a chore would make longer."""


class EngineService:
    """Implements ``engine.interface.Service``.

    The event loop admits requests and reads adapters; a thread of the engine's own runs the steps
    and whatever else touches the core, one command at a time between two steps. An exception that
    nobody expected, in a step or in a command, ends the thread: what it leaves behind may be half
    done, so every call ends with an error, the listener is told, and nothing more is taken.
    """

    def __init__(
        self,
        core: EngineCore,
        worker: Worker,
        admission: Admission,
        languages: Languages,
        *,
        base_name: str,
        max_open: int,
        adapters: Sequence[tuple[str, str]] = (),
        sources: AdapterSources | None = None,
        registry: Registry | None = None,
    ) -> None:
        """``adapters`` are names and sources to load at start, and ``registry`` has more, which
        give way to these; ``max_open`` bounds all requests."""
        self.base_name = base_name
        self.max_model_len = admission.limits.max_model_len
        self._core = core
        self._languages = languages
        self._admission = admission
        reader = AdapterReader(worker, sources or AdapterSources(), languages)
        self._fetcher = Fetcher(reader, self._take)
        self._admin = AdapterAdmin(
            core,
            admission.catalog,
            reader,
            languages,
            self._call,
            registry=registry,
            reserved=[name for name, _ in adapters],
        )
        self._max_open = max_open
        self._adapters_at_start = tuple(adapters)
        self._num_open: dict[RequestId, int] = {}
        """Completions of each request that have not ended."""
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="loramux-guide")
        """So few that a flood of bad guides takes no thread from other work."""
        self._calls: set[asyncio.Future[object]] = set()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._ended = asyncio.Event()
        self._failure: str | None = None

    async def start(self, listener: Listener) -> None:
        """Start the engine's thread, load the adapters named at start and take in the registry's.

        Raises AdapterError.
        """
        assert self._thread is None, "an engine starts once"
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="loramux-engine", daemon=True)
        self._thread.start()
        try:
            warming_up = self._compilers.submit(self._languages.of(None).text.warm_up)
            for name, source in self._adapters_at_start:
                await self.load_adapter(name, source)
            await self._admin.restore()
            await asyncio.wrap_future(warming_up)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all requests with the reason ``abort``, and the thread after its current step."""
        if self._thread is None:
            return
        if not self._stopping:
            self._stopping = True
            for request_id in self._num_open:
                self.abort(request_id)
            self._commands.put(None)
        await self._ended.wait()
        self._thread.join()
        self._compilers.shutdown(wait=False)

    async def text_of(self, model: str | None) -> TextCodec:
        """The codec of a model. Raises UnknownModel or AdapterError."""
        await self._admin.prepare(model)
        return self._languages.of(self._admission.catalog.id_of(model)).text

    async def submit(self, request: EngineRequest) -> None:
        """Raises RequestError, MissingPackage, or EngineStopped when the engine is down."""
        self._check_open()
        grammar = None
        if isinstance(request, GenerationRequest) and request.params.guide is not None:
            text = self._admission.compiler_of(request)
            compiling = self._compilers.submit(text.compile, request.params.guide)
            grammar = await asyncio.wrap_future(compiling)
            self._check_open()
            request = replace(request, codec=text.key)
        sequences = self._admission.admit(request, grammar)
        self._num_open[sequences[0].parent_id] = len(sequences)
        self._commands.put(lambda: self._core.add(sequences))

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is; nothing happens if it has ended."""
        self._commands.put(lambda: self._core.abort(request_id))

    async def load_adapter(
        self,
        name: str,
        source: str,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        rules: SourceRules | None = None,
    ) -> AdapterInfo:
        """Read, check and register an adapter while steps go on. Raises AdapterError."""
        self._check_alive()
        return await self._admin.load(
            name, source, load_inplace=load_inplace, pinned=pinned, rules=rules
        )

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for a name; running ones finish. Raises UnknownAdapter."""
        await self._admin.unload(name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Raises UnknownAdapter or AdapterRefused."""
        return await self._admin.pin(name, pinned=pinned)

    async def adapters(self) -> list[AdapterInfo]:
        return self._core.adapters.infos()

    async def stats(self) -> EngineStats:
        return self._core.stats()

    # The event loop's side.

    def _check_open(self) -> None:
        """Raises EngineStopped or TooManyRequests."""
        self._check_alive()
        if len(self._num_open) >= self._max_open:
            raise TooManyRequests(
                f"{len(self._num_open)} requests run or wait, which is the limit: try again later"
            )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"{self._failure}: restart the server")
        if self._thread is None or self._stopping:
            raise EngineStopped("the engine is not running")

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command in the engine's thread and wait for its result.

        A LoramuxError means that nothing has changed, and is the caller's.
        """
        self._check_alive()
        assert self._loop is not None
        loop, future = self._loop, self._loop.create_future()

        def settle(result: T | None, error: LoramuxError | None) -> None:
            if future.done():  # the caller has been cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = command()
            except LoramuxError as refusal:
                error = refusal
            loop.call_soon_threadsafe(settle, result, error)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(run)
        return await future

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._num_open[delta.request_id] -= 1
                if not self._num_open[delta.request_id]:
                    del self._num_open[delta.request_id]
        assert self._listener is not None
        self._listener.deliver(deltas)

    def _end(self, failure: str) -> None:
        """The thread has ended: nobody may go on waiting for it."""
        self._failure = failure
        self._num_open.clear()
        for call in list(self._calls):
            if not call.done():
                call.set_exception(EngineStopped(failure))
        assert self._listener is not None
        self._listener.end(failure)
        self._ended.set()

    # The thread.

    def _run(self) -> None:
        failure = "the engine has been stopped"
        try:
            while self._run_commands(wait=not self._core.can_step):
                self._send(self._core.step())
                self._fetcher.start(self._core.take_fetches())
            self._core.step()  # one may be in flight; its requests have been aborted
        except BaseException as error:
            log.exception("the engine has failed")
            failure = f"the engine has failed: {type(error).__name__}: {error}"
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody left to tell
            self._loop.call_soon_threadsafe(self._end, failure)

    def _run_commands(self, *, wait: bool) -> bool:
        """Run all that has been posted, after waiting for it if ``wait``; False at the end."""
        while True:
            try:
                command = self._next_command() if wait else self._commands.get(block=False)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._send(command())
            self._fetcher.start(self._core.take_fetches())
            wait = wait and not self._core.can_step

    def _next_command(self) -> Command | None:
        """Wait for a command; what takes longer than a short pause is put to use."""
        timeout: float | None = _PAUSE_SECONDS
        while True:
            try:
                return self._commands.get(timeout=timeout)
            except queue.Empty:
                timeout = 0.0 if self._core.use_spare_time() else None

    def _take(self, origin: Origin, outcome: Outcome) -> None:
        """An adapter has been fetched, or not; called in a thread of the fetcher."""
        if isinstance(outcome, str):
            error = outcome
            self._commands.put(lambda: self._core.fetch_failed(origin, error))
        else:
            self._commands.put(lambda: self._core.fetched(origin, outcome))

    def _send(self, deltas: Sequence[Delta] | None) -> None:
        if deltas:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver, deltas)
