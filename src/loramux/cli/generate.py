"""``loramux generate``: one answer on the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from loramux.cli.logs import setup_logging
from loramux.cli.options import parse_adapters, with_options
from loramux.config import EngineOptions
from loramux.types import SamplingParams


@with_options
def generate(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help="Directory or Hugging Face id of the base model.")
    ],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to continue, or with --chat to answer.")
    ],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SOURCE", help="Adapter to load; may be repeated."),
    ] = None,
    use: Annotated[
        str | None, typer.Option(metavar="NAME", help="Adapter that answers; default: the base.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Wrap PROMPT in the model's chat template.")
    ] = False,
    *,
    options: EngineOptions,
) -> None:
    """Print the answer of BASE, or of one of its adapters, to PROMPT."""
    adapters = parse_adapters(adapter or [])
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    setup_logging()

    from loramux import LLM

    llm = LLM(base, adapters=adapters, options=options)
    if chat:
        conversation = [{"role": "user", "content": prompt}]
        [output] = llm.chat([conversation], params, adapter=use)
    else:
        [output] = llm.generate([prompt], params, adapter=use)
    typer.echo(output.text)
