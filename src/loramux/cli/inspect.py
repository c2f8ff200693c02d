"""``loramux inspect``: whether an adapter can be served, what it is made of, what is unusual."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loramux.adapters.inspected import ReferenceBase
from loramux.adapters.inspection import inspect_adapter
from loramux.adapters.sources import AdapterSources
from loramux.adapters.spec import BaseLayout, LoraSpec
from loramux.cli.inspection_text import lines, plot
from loramux.cli.options import with_options
from loramux.config import AdapterOptions, SourceOptions
from loramux.errors import AdapterError, ConfigError


@with_options
def inspect(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER",
            help="Directory of the adapter, an archive of NeMo, hf:org/repo, or a URL of one.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="Directory of the base model to check it against."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with everything instead of text.")
    ] = False,
    norms: Annotated[
        bool,
        typer.Option("--norms/--no-norms", help="Measure deltas, with --base relative to BASE's."),
    ] = True,
    max_rank: Annotated[
        int, typer.Option(min=1, help="Largest rank that the server would accept.")
    ] = AdapterOptions().max_rank,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="As for the server: warn of unknown fields only.")
    ] = False,
    *,
    sources: SourceOptions,
) -> None:
    """Say whether ADAPTER can be served and, if not, every reason why.

    The exit code is 0 if nothing speaks against it, 1 if it is refused, 2 for wrong use.
    """
    try:
        with AdapterSources(sources).open(adapter, adapter) as directory:
            found = inspect_adapter(
                directory,
                None if base is None else _reference(base),
                max_rank=max_rank,
                packed_bytes=_packed_bytes,
                lenient=lenient,
                measure=norms,
            )
    except (AdapterError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    found = dataclasses.replace(found, adapter=adapter)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        for line in lines(found):
            typer.echo(line)
        if found.layers and _on_terminal():
            Console().print(plot(found.layers))
    raise typer.Exit(1 if found.verdict == "refused" else 0)


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _reference(path: str) -> ReferenceBase:
    """Raises ConfigError or ModelNotServable."""
    import transformers  # loads torch

    from loramux.model.blueprint import StoredWeights, draw

    # What it advises about architectures is no matter of the adapter.
    transformers.utils.logging.set_verbosity_error()
    blueprint = draw(path)
    remarks = ("the base's code does not run without weights: modules are told by name alone",)
    return ReferenceBase(
        layout=blueprint.layout,
        dtype=str(blueprint.dtype).removeprefix("torch."),
        weight_norm=StoredWeights(Path(path).expanduser(), blueprint.layout).norm,
        remarks=() if blueprint.examined else remarks,
    )


def _packed_bytes(spec: LoraSpec, layout: BaseLayout, dtype: str) -> int:
    import torch

    from loramux.lora.weights import packed_bytes

    return packed_bytes(spec, layout, getattr(torch, dtype))
