"""What the handlers of one app share."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from loramux.config import ServerOptions
from loramux.engine.interface import Engine, TextCodec
from loramux.errors import EngineStopped, UnknownModel
from loramux.server.metrics import Metrics


@dataclass(frozen=True)
class ServerContext:
    """The engine and the server's settings; ``base_name`` is how requests call the base model."""

    engine: Engine
    options: ServerOptions
    base_name: str
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start, which ``/v1/models`` reports."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set once the server has been told to stop: it takes no new work."""

    def check_ready(self) -> None:
        """Raise EngineStopped where new work has no place."""
        if self.engine.failure is not None:
            raise EngineStopped(self.engine.failure)
        if self.stopping.is_set():
            raise EngineStopped("the server is shutting down: send the request to another one")

    async def codec_of(self, name: str | None) -> TextCodec:
        """The tokenizer of a request's ``model``; the base's where it names none.

        Raises UnknownModel, or AdapterError where an adapter's tokenizer cannot be read.
        """
        model = None if name is None else self.engine_model(name)
        await self.engine.prepare(model)
        return self.engine.text_of(model)

    def engine_model(self, name: str) -> str | None:
        """A request's ``model`` as the engine knows it: None is the base model."""
        if name == self.base_name:
            return None
        if name == self.engine.base_name:
            # The engine would take its own name for the base, but it is served under another.
            raise UnknownModel(name)
        return name


def _context(request: Request) -> ServerContext:
    return request.app.state.context


Context = Annotated[ServerContext, Depends(_context)]
"""Parameter of a handler: the app's context."""
