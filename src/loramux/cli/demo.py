"""``loramux demo``: base and adapters answer the same prompts in one batch, before your eyes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from loramux.config import (
    DEFAULT_LIMITS,
    AdapterOptions,
    EngineOptions,
    SchedulerOptions,
    ServerOptions,
)
from loramux.demo.adapters import default_adapters_folder, find_adapters
from loramux.demo.answers import Grid, Summary
from loramux.demo.base import BASE_NAME, demo_base
from loramux.demo.show import Screen, show_answers

# Questions that even a model of 135M weights answers in each adapter's style.
PROMPTS = ("What is the opposite of hot?", "What day comes after Monday?", "Is the sky blue?")

_PROMPT_TOKENS = 128
"""Room for a prompt in the first step, so that all requests start together."""


def demo(
    prompt: Annotated[
        list[str] | None, typer.Option(help="Ask this instead of the three prompts; repeatable.")
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(help="Folder of PEFT folders; default: examples/adapters of the checkout."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 40,
    serve: Annotated[bool, typer.Option("--serve", help="Go on as an HTTP server.")] = False,
    port: Annotated[int, typer.Option(help="Port of --serve; 0 takes a free one.")] = 8000,
    plain: Annotated[
        bool, typer.Option("--plain", help="A line for each answer instead of a live table.")
    ] = False,
) -> None:
    """Ask a small base model and its adapters the same questions, all in one batch.

    The exit code is 0 if every request finished and one step held all adapters, else 1.
    """
    sources = find_adapters(adapters or default_adapters_folder())
    grid = Grid(adapters=tuple(sources), prompts=tuple(prompt or PROMPTS))
    screen = Screen.of_stdout(plain=plain)
    # Before the model is loaded: that a port is taken should show at once.
    with _bound(port) if serve else contextlib.nullcontext() as sock:
        base = demo_base(lambda line: typer.echo(line, err=True))
        running = _run(base, sources, grid, screen=screen, max_tokens=max_tokens, sock=sock)
        summary = asyncio.run(running)
    raise typer.Exit(0 if summary.ok else 1)


def _bound(port: int) -> socket.socket:
    from loramux.server.listen import bind  # loads fastapi

    options = ServerOptions(port=port)
    return bind(options.host, options.port)


async def _run(
    base: Path,
    sources: Mapping[str, str],
    grid: Grid,
    *,
    screen: Screen,
    max_tokens: int,
    sock: socket.socket | None,
) -> Summary:
    with screen.busy("starting the engine"):
        from loramux.engine.build import build_async_engine  # loads torch

        engine = build_async_engine(str(base), engine_options(grid), sources, BASE_NAME)
        await engine.start()
    try:
        summary = await show_answers(engine, grid, screen, max_tokens=max_tokens)
        typer.echo(summary.line)
        if sock is not None:
            from loramux.demo.serve import serve_engine  # loads fastapi

            await serve_engine(engine, sock, (BASE_NAME, *sources), grid.prompts[0])
        return summary
    finally:
        await engine.stop()


def engine_options(grid: Grid) -> EngineOptions:
    """Options with which one step can hold every request of the grid."""
    num_requests = len(list(grid.answers))
    adapters, least = AdapterOptions(), DEFAULT_LIMITS["cpu"]
    return EngineOptions(
        adapters=AdapterOptions(max_loras=max(adapters.max_loras, len(grid.adapters))),
        scheduler=SchedulerOptions(
            max_num_seqs=max(least.max_num_seqs, num_requests),
            max_step_tokens=max(least.max_step_tokens, num_requests * _PROMPT_TOKENS),
        ),
    )
