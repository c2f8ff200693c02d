"""``loramux verify``: whether this machine gives the answers that PEFT gives."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from loramux.adapters.sources import AdapterSources
from loramux.cli.logs import setup_logging
from loramux.cli.options import name_adapters, with_options
from loramux.cli.verification_text import lines
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SourceOptions
from loramux.errors import AdapterError, ConfigError

PROMPTS = (
    "The capital of France is",
    "What is the sea made of?",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a fox who lived at the edge of a large forest. One morning",
)
"""Where none are given."""


@with_options
def verify(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Directory of the base model.")],
    adapters: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]SOURCE...", help="Adapters, as `loramux serve` takes them."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="May be repeated; default: four short ones."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts, one on each line that has any.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Wrap prompts in the model's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer in tokens.")] = 16,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, on both sides.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto, on both sides.")] = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest difference of a log-probability; default: 1e-3 for float32, 0.5 for "
            "bfloat16.",
        ),
    ] = None,
    max_rank: Annotated[
        int, typer.Option(min=1, help="Largest rank that is accepted.")
    ] = AdapterOptions().max_rank,
    device_cache: Annotated[
        str | None, typer.Option(help="Bytes for all adapters together, if the default is too few.")
    ] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="As for the server: warn of unknown fields only.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with everything instead of text.")
    ] = False,
    *,
    sources: SourceOptions,
) -> None:
    """Compare the answers of BASE and its adapters with PEFT's, on this machine.

    All adapters and the base run here in one mixed batch, and each alone in PEFT, which opens the
    adapters itself: name only those that you trust. The exit code is 0 if all agree within the
    tolerance, 1 if one does not, is refused or cannot be compared, 2 for wrong use.
    """
    try:
        named = name_adapters(adapters)
        options = EngineOptions(
            model=ModelOptions(dtype=dtype, device=device),
            adapters=AdapterOptions(max_rank=max_rank, device_cache=device_cache, lenient=lenient),
        )
        texts = [*(prompt or ()), *(() if prompts is None else _read(prompts))] or PROMPTS
        setup_logging()

        from loramux.engine.verify import Task, verify  # loads torch

        with ExitStack() as stack:
            places = AdapterSources(sources)
            task = Task(
                base=base,
                adapters={n: stack.enter_context(places.open(n, s)) for n, s in named.items()},
                prompts=texts,
                chat=chat,
                max_tokens=max_tokens,
                tolerance=tolerance,
            )
            found = verify(task, options)
    except (AdapterError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        for line in lines(found):
            typer.echo(line)
    raise typer.Exit(0 if found.agrees else 1)


def _read(file: Path) -> list[str]:
    """Raises BadParameter when the file cannot be read or has no prompt."""
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--prompts {file}: {error}") from error
    if not found:
        raise typer.BadParameter(f"--prompts {file}: there is no prompt in it")
    return found
