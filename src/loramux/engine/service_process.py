"""An engine's service in a process of its own, so that HTTP and text take no time of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from loramux.engine import messages
from loramux.engine.channel import Channel
from loramux.engine.interface import Listener, Service, TextCodec
from loramux.errors import EngineStopped
from loramux.stats import EngineStats
from loramux.types import AdapterInfo, EngineRequest, RequestId, SourceRules

_CHILD = "loramux.engine.child"
_CACHED_CODECS = 16
"""Tokenizers kept here; each takes some megabytes."""
_LAST_STEP_SECONDS = 60.0
"""After an orderly end is asked for, this long until the process is killed."""


class ServiceProcess:
    """Implements ``engine.interface.Service`` by a child process; see ``engine.child`` for that."""

    def __init__(self, build: Callable[[], Service]) -> None:
        """``build`` makes the service over there: it is pickled, so it must be a function of a
        module or a ``functools.partial`` of one. It may raise LoramuxError."""
        self.base_name = ""
        self.max_model_len = 0
        self._build = build
        self._process: subprocess.Popen[bytes] | None = None
        self._channel = Channel(self._receive, self._lose)
        self._listener: Listener | None = None
        self._started: asyncio.Future[messages.Started] | None = None
        self._ended = asyncio.Event()
        self._failure: str | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._codecs: OrderedDict[str, TextCodec] = OrderedDict()
        self._adapters: list[AdapterInfo] = []
        self._stats: EngineStats | None = None

    @property
    def process_id(self) -> int:
        """Once it has been started."""
        assert self._process is not None
        return self._process.pid

    async def start(self, listener: Listener) -> None:
        """Start the process and wait until its engine takes requests.

        Raises LoramuxError as ``build`` and the service's own start do, EngineStopped where the
        process has ended for another reason.
        """
        assert self._process is None, "an engine starts once"
        self._listener = listener
        self._started = asyncio.get_running_loop().create_future()
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-P", "-m", _CHILD]
            self._process = subprocess.Popen(
                [*command, str(there.fileno()), str(os.getpid())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        await self._channel.open(here)
        self._channel.send(sys.path)
        self._channel.send(self._build)
        try:
            started = await self._started
        except BaseException:
            self._process.kill()
            await self._ended.wait()
            raise
        self.base_name, self.max_model_len = started.base_name, started.max_model_len
        self._adapters, self._stats = started.adapters, started.stats

    async def stop(self) -> None:
        """End all requests with the reason ``abort``, then the process."""
        if self._process is None:
            return
        self._channel.send(messages.Stop())
        try:
            async with asyncio.timeout(_LAST_STEP_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self._process.kill()
            await self._ended.wait()

    async def submit(self, request: EngineRequest) -> None:
        await self._call("submit", request)

    def abort(self, request_id: RequestId) -> None:
        self._channel.send(messages.Abort(request_id))

    async def text_of(self, model: str | None) -> TextCodec:
        key = await self._call(messages.CODEC_KEY, model)
        if key not in self._codecs:
            codec = await self._call("text_of", model)
            key = codec.key  # the name may mean another adapter by now
            self._codecs[key] = codec
            if len(self._codecs) > _CACHED_CODECS:
                self._codecs.popitem(last=False)
        self._codecs.move_to_end(key)
        return self._codecs[key]

    async def load_adapter(
        self,
        name: str,
        source: str,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        rules: SourceRules | None = None,
    ) -> AdapterInfo:
        return await self._call(
            "load_adapter", name, source, load_inplace=load_inplace, pinned=pinned, rules=rules
        )

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        return await self._call("pin_adapter", name, pinned=pinned)

    async def adapters(self) -> list[AdapterInfo]:
        """Those known last, once the process has ended."""
        with contextlib.suppress(EngineStopped):
            self._adapters = await self._call("adapters")
        return self._adapters

    async def stats(self) -> EngineStats:
        """Those known last, once the process has ended."""
        with contextlib.suppress(EngineStopped):
            self._stats = await self._call("stats")
        assert self._stats is not None, "the engine has not started"
        return self._stats

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        if self._failure is not None:
            raise EngineStopped(self._failure)
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._channel.send(messages.Call(number, method, args, options))
        try:
            return await future
        except asyncio.CancelledError:
            self._channel.send(messages.Cancel(number))
            raise
        finally:
            del self._calls[number]

    # What the other process says.

    def _receive(self, message: Any) -> None:
        assert self._listener is not None
        assert self._started is not None
        match message:
            case list():
                self._listener.deliver(messages.unpack(message))
            case messages.Result(number, value):
                if (future := self._waiting(number)) is not None:
                    future.set_result(value)
            case messages.Error(number, error):
                if (future := self._waiting(number)) is not None:
                    future.set_exception(error)
            case messages.Started():
                self._started.set_result(message)
            case messages.NotStarted(error):
                self._started.set_exception(error)
            case messages.Ended(failure):
                self._end(failure)
            case _:
                raise AssertionError(f"no message from an engine: {message!r}")

    def _waiting(self, number: int) -> asyncio.Future[Any] | None:
        """A call for whose answer somebody still waits."""
        future = self._calls.get(number)
        return None if future is None or future.done() else future

    def _lose(self) -> None:
        """The other end is closed, which is how every end of the process shows here."""
        self._reaping = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        assert self._process is not None
        assert self._started is not None
        status = await asyncio.to_thread(self._process.wait)
        self._end(f"the engine's process has ended: {_describe(status)}")
        if not self._started.done():
            self._started.set_exception(EngineStopped(str(self._failure)))
        self._ended.set()

    def _end(self, failure: str) -> None:
        """The service has ended: nobody may go on waiting for it."""
        assert self._listener is not None
        if self._failure is not None:
            return
        self._failure = failure
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineStopped(failure))
        self._listener.end(failure)


def _describe(status: int) -> str:
    """An exit status as ``subprocess`` has it, in words."""
    if status >= 0:
        return f"exit status {status}, see the log"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", which the system sends when memory is short" if name == "SIGKILL" else ""
    return f"{name}{hint}"
