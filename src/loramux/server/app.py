"""Puts the HTTP server together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from loramux import __version__
from loramux.config import ServerOptions
from loramux.engine.interface import Engine
from loramux.server import (
    adapters,
    chat,
    completions,
    embeddings,
    errors,
    models,
    openapi,
    tokenizing,
)
from loramux.server.context import Context, ServerContext
from loramux.server.key_file import read_keys
from loramux.server.keys import Keyring
from loramux.server.metrics import Metrics
from loramux.server.middleware import RequestMiddleware
from loramux.server.tracing import start_tracing

if TYPE_CHECKING:
    from loramux.server.spans import Tracing

router = APIRouter()


def create_app(
    engine: Engine,
    *,
    options: ServerOptions | None = None,
    base_name: str | None = None,
    keyring: Keyring | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The HTTP server over a running engine, which the caller starts and stops.

    Requests call the base model ``base_name``; by default the name in ``options``, else the
    engine's own. The keys of ``keyring`` are let in; by default those of the file in ``options``,
    and then ConfigError is raised where that cannot be read. Requests leave spans by ``tracing``;
    by default by what ``options`` say, and then MissingPackage is raised where packages are missing
    for it. ``serve_app`` stops it.
    """
    options = options or ServerOptions()
    if keyring is None:
        keyring = read_keys(options.keys, {})
    if tracing is None:
        tracing = start_tracing(options.otlp_traces_endpoint, os.environ)
    name = base_name or options.served_model_name or engine.base_name
    app = FastAPI(title="loramux", version=__version__)
    metrics = Metrics(engine, max_adapters=options.metrics_adapters, keyring=keyring)
    app.state.context = ServerContext(engine, options, name, metrics, keyring, tracing)
    errors.install(app)
    openapi.install(app)
    app.add_middleware(
        RequestMiddleware, metrics=metrics, access_log=options.access_log, tracing=tracing
    )
    parts = (models, completions, chat, embeddings, tokenizing, adapters)
    for part in (router, *(module.router for module in parts)):
        app.include_router(part)
    return app


@router.get("/health")
async def health(context: Context) -> dict[str, str]:
    """200 while the engine lives, 503 with the cause once it has died."""
    context.check_alive()
    return {"status": "ok"}


@router.get("/ready")
async def ready(context: Context) -> dict[str, str]:
    """200 while new requests are taken; 503 once the engine has died or the server is to stop."""
    context.check_ready()
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of loramux."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: Context) -> Response:
    """Metrics in Prometheus' text format."""
    return Response(await context.metrics.text(), media_type=CONTENT_TYPE_LATEST)
