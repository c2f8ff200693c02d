"""An engine's face to an event loop: streams over a service, wherever that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from loramux.engine.interface import Service, TextCodec
from loramux.engine.streams import EngineStream, Streams
from loramux.errors import EngineStopped
from loramux.stats import EngineStats
from loramux.types import AdapterInfo, Delta, EngineRequest, SourceRules, new_request_id


class AsyncEngine:
    """Implements ``engine.interface.Engine`` over a service, and listens to it.

    When the service ends, every stream ends with an error and no new request is taken.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams = Streams(service.abort)
        self._failure: str | None = None
        self._ended = asyncio.Event()

    @property
    def base_name(self) -> str:
        """Known once the engine has started."""
        return self._service.base_name

    @property
    def max_model_len(self) -> int:
        """Known once the engine has started."""
        return self._service.max_model_len

    @property
    def failure(self) -> str | None:
        """Why the engine takes no more requests, once it has ended."""
        return self._failure

    async def wait_ended(self) -> None:
        """Return once the engine has ended, for whatever reason."""
        await self._ended.wait()

    async def start(self) -> None:
        """Raises LoramuxError."""
        await self._service.start(self)

    async def stop(self) -> None:
        """End all requests with the reason ``abort``, and the engine after its current step."""
        await self._service.stop()

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Raises RequestError, MissingPackage, or EngineStopped when the engine is down."""
        self._check_alive()
        request_id = request.request_id or new_request_id()
        # Before the request is: the first delta may be here before the service's answer.
        stream = self._streams.open(request_id, request.num_completions)
        try:
            await self._service.submit(replace(request, request_id=request_id))
        except asyncio.CancelledError:
            stream.abort()
            self._streams.drop(request_id)
            raise
        except BaseException:
            self._streams.drop(request_id)
            raise
        return stream

    async def text_of(self, model: str | None) -> TextCodec:
        """The codec of a model. Raises UnknownModel or AdapterError."""
        return await self._service.text_of(model)

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
        return await self._service.load_adapter(
            name, source, load_inplace=load_inplace, pinned=pinned, rules=rules
        )

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for a name; running ones finish. Raises UnknownAdapter."""
        await self._service.unload_adapter(name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Raises UnknownAdapter or AdapterRefused."""
        return await self._service.pin_adapter(name, pinned=pinned)

    async def adapters(self) -> list[AdapterInfo]:
        return await self._service.adapters()

    async def stats(self) -> EngineStats:
        return await self._service.stats()

    # What the service says.

    def deliver(self, deltas: Sequence[Delta]) -> None:
        self._streams.deliver(deltas)

    def end(self, failure: str) -> None:
        self._failure = failure
        self._streams.fail(failure)
        self._ended.set()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"{self._failure}: restart the server")
