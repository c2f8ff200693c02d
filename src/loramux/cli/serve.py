"""``loramux serve``: the HTTP server over one base model and its adapters."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loramux.adapters.registry import Registry
from loramux.cli.logs import setup_logging
from loramux.cli.options import parse_adapters, with_options
from loramux.config import EngineOptions, ServerOptions
from loramux.engine.own_process import keep_compiled
from loramux.errors import EngineStopped
from loramux.server.key_file import read_keys
from loramux.server.key_watch import watching_keys
from loramux.server.tracing import start_tracing

if TYPE_CHECKING:
    from loramux.engine.interface import Service


@with_options
def serve(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Directory or Hugging Face id of the base model.")
    ],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SOURCE", help="Adapter to load at start; may be repeated."),
    ] = None,
    *,
    engine: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve BASE and its adapters over an OpenAI-compatible HTTP API.

    Ends with 0 after SIGTERM or SIGINT, with 1 where it cannot start or its engine has died.
    """
    adapters = parse_adapters(adapter or [])
    if server.served_model_name in adapters:
        raise typer.BadParameter(
            f"--served-model-name {server.served_model_name} is also the name of an adapter"
        )
    if server.adapter_root is not None and not Path(server.adapter_root).expanduser().is_dir():
        raise typer.BadParameter(f"--adapter-root {server.adapter_root} is no directory")
    setup_logging(server.log_format)
    keyring = read_keys(server.keys, os.environ)
    tracing = start_tracing(server.otlp_traces_endpoint, os.environ)

    from loramux.server.listen import bind, serve_app

    # Before the model is loaded: a port that is taken should not cost minutes.
    with bind(server.host, server.port) as sock:
        from loramux.engine.async_engine import AsyncEngine
        from loramux.engine.service_process import ServiceProcess
        from loramux.server.app import create_app

        build = partial(
            build_service,
            base,
            engine,
            adapters,
            server.registry,
            served_model_name=server.served_model_name,
            log_format=server.log_format,
        )
        running = AsyncEngine(ServiceProcess(build))

        async def run() -> None:
            async with watching_keys(keyring, server.keys, os.environ):
                await running.start()
                try:
                    app = create_app(running, options=server, keyring=keyring, tracing=tracing)
                    await serve_app(app, sock, until=running.wait_ended())
                    failure = running.failure
                finally:
                    await running.stop()
            if failure is not None:
                # Nothing here can be answered any more: whoever has started it may start it again.
                raise EngineStopped(failure)

        asyncio.run(run())


def build_service(
    base: str,
    options: EngineOptions,
    adapters: dict[str, str],
    registry: str | None,
    *,
    served_model_name: str | None,
    log_format: str,
) -> Service:
    """Make the engine, in a process of its own. Raises LoramuxError."""
    setup_logging(log_format)
    keep_compiled(os.environ)
    place = None if registry is None else Registry(registry)

    from loramux.engine import build

    return build.build_service(
        base, options, adapters, registry=place, base_alias=served_model_name
    )
