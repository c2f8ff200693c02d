"""``loramux tune``: measure which tile sizes of the LoRA kernels are fastest on this GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from loramux.cli.logs import setup_logging
from loramux.errors import ConfigError
from loramux.ops.tuning import Entry, Measured, file_name, write_table


def tune(
    base: Annotated[
        str | None, typer.Argument(metavar="BASE", help="Directory of the base model to tune for.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Instead of BASE: llama-1b, llama-8b or llama-70b."),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rank of the adapters; may be repeated; default: 16 and 64."),
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=1, help="Slots: adapters in a batch that has as many as it can.")
    ] = 32,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: one named after the GPU, here.")
    ] = None,
) -> None:
    """Measure tile sizes for BASE on this GPU and write a table for ``loramux serve --tuning``.

    Takes some minutes, most of which go into compiling kernels.
    """
    if (base is None) == (shape is None):
        raise typer.BadParameter("name a BASE or a --shape, and not both")
    setup_logging()

    from loramux.worker import tune as worker  # loads torch

    started = time.perf_counter()
    try:
        worker.require_gpu()
        shapes = worker.shapes_named(shape) if shape else worker.shapes_of_base(base or "")
        typer.echo(f"{'microseconds added: one adapter, distinct':>90}   (by the rule)")
        table = worker.tune(shapes, rank or [16, 64], max_loras, _print)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    file = out or Path(file_name(table.gpu))
    write_table(table, file)
    seconds = time.perf_counter() - started
    typer.echo(f"wrote {len(table.entries)} entries for {table.gpu} to {file} in {seconds:.0f} s")


def _print(entry: Entry, rule: Measured | None) -> None:
    """One line for each entry as it is found."""
    tiles, times = entry.tiles, entry.measured
    if times is None:
        typer.echo(f"{entry.key!s:52} no tiles fit this GPU: left to the rule")
        return
    chosen = (
        f"{tiles.split_k}x{tiles.block_k} s{tiles.shrink_stages}, "
        f"{tiles.block_n} w{tiles.expand_warps} s{tiles.expand_stages}"
    )
    line = f"{entry.key!s:52} {chosen:22} {times.one_adapter:7.2f} {times.distinct:7.2f}"
    if rule is not None:
        line += f"   ({rule.one_adapter:.2f} {rule.distinct:.2f})"
    typer.echo(line)
