from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from loramux.config import ServerOptions
from loramux.server.app import create_app
from loramux.testing import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(adapters={"shout": "/adapters/shout"})


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    # An event for each token, however fast they come.
    app = create_app(engine, options=ServerOptions(stream_interval=0))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[str]:
    """The URL of a real server over the ``engine`` fixture."""
    with serving(create_app(engine)) as url:
        yield url


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """``app`` behind uvicorn on a free port, in a thread."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=asyncio.run, args=[server.serve(sockets=[sock])])
        thread.start()
        try:
            while not server.started:  # before, connections are refused
                assert thread.is_alive()
                time.sleep(0.005)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
