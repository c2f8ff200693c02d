"""What the handlers of one app share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from loramux.config import ServerOptions
from loramux.engine.interface import Engine, TextCodec
from loramux.errors import EngineStopped, UnknownModel
from loramux.server.keys import Caller, Keyring
from loramux.server.metrics import Metrics
from loramux.types import AdapterInfo

if TYPE_CHECKING:
    from loramux.server.spans import Tracing


@dataclass(frozen=True)
class ServerContext:
    """The engine and the server's settings; ``base_name`` is how requests call the base model."""

    engine: Engine
    options: ServerOptions
    base_name: str
    metrics: Metrics
    keyring: Keyring
    tracing: Tracing | None = None
    """Of requests to models, where the operator wants it."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start, which ``/v1/models`` reports."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set once the server has been told to stop: it takes no new work."""

    def check_alive(self) -> None:
        """Raise EngineStopped with the cause once the engine has died."""
        if self.engine.failure is not None:
            raise EngineStopped(self.engine.failure)

    def check_ready(self) -> None:
        """Raise EngineStopped where new work has no place."""
        self.check_alive()
        if self.stopping.is_set():
            raise EngineStopped("the server is shutting down: send the request to another one")

    async def codec_of(self, name: str | None, caller: Caller) -> TextCodec:
        """The tokenizer of a request's ``model``; the base's where it names none.

        Raises UnknownModel, or AdapterError where an adapter's tokenizer cannot be read.
        """
        model = self.engine_model(self.base_name if name is None else name, caller)
        return await self.engine.text_of(model)

    def engine_model(self, name: str, caller: Caller) -> str | None:
        """A request's ``model`` as the engine knows it: None is the base model.

        Raises UnknownModel for what the caller may not ask, whether it exists or not.
        """
        if not caller.may_ask(name):
            raise UnknownModel(name)
        if name == self.base_name:
            return None
        if name == self.engine.base_name:
            # The engine would take its own name for the base, but it is served under another.
            raise UnknownModel(name)
        return name

    async def adapters(self, caller: Caller) -> list[AdapterInfo]:
        """The adapters that the caller may know of."""
        return [info for info in await self.engine.adapters() if caller.may_see(info.name)]


def _context(request: Request) -> ServerContext:
    return request.app.state.context


Context = Annotated[ServerContext, Depends(_context)]
"""Parameter of a handler: the app's context."""
