"""Listens on a socket until a signal says stop."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from loramux.errors import ConfigError
from loramux.server.context import ServerContext

logger = logging.getLogger(__name__)

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections: the side that may close must not be the server."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address that refuses connections until it is served.

    Raises ConfigError where the address cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return sock


async def serve_app(
    app: FastAPI, sock: socket.socket, *, until: Awaitable[object] | None = None
) -> None:
    """Serve ``app`` on a socket of ``bind`` until SIGINT or SIGTERM, or until ``until`` is done.

    Then nothing new is taken, what runs has the option ``shutdown_grace`` to finish, and spans that
    have not been sent are, within a few seconds.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        # The rule for admin calls needs the address that really connected.
        proxy_headers=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(_context(app).options.shutdown_grace),
    )
    server = _Server(config)
    watching = None if until is None else asyncio.create_task(_stop_after(until, server))
    try:
        await server.serve(sockets=[sock])
    finally:
        if watching is not None:
            watching.cancel()
        if (tracing := _context(app).tracing) is not None:
            await tracing.stop()


async def _stop_after(until: Awaitable[object], server: _Server) -> None:
    await until
    server.stop()


class _Server(uvicorn.Server):
    """Says when it is ready, and returns after a signal.

    uvicorn raises the signal again once it is done, which would end the process before the engine
    is stopped.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        await _log_ready(_context(self.config.app), sockets[0])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        _context(self.config.app).stopping.set()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Stop as after a signal."""
        _context(self.config.app).stopping.set()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _context(app: object) -> ServerContext:
    assert isinstance(app, FastAPI)
    return app.state.context


async def _log_ready(context: ServerContext, sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    adapters = ", ".join(info.name for info in await context.engine.adapters()) or "none"
    logger.info(
        "ready at http://%s:%d, base model %s, adapters: %s",
        shown,
        port,
        context.base_name,
        adapters,
    )
