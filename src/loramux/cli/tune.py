"""``loramux tune``: measure which tile sizes of the LoRA kernels are fastest on this GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from loramux.cli.logs import setup_logging
from loramux.errors import ConfigError
from loramux.ops.tuning import ROW_BUCKETS, Entry, Table, file_name, read_table, write_table


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
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Measure only steps like those of so many rows; may be repeated; default: all.",
        ),
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=1, help="Slots: adapters in a batch that has as many as it can.")
    ] = 32,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write, or to renew what is measured now; default: one named after the "
            "GPU, here."
        ),
    ] = None,
) -> None:
    """Measure tile sizes for BASE on this GPU and write a table for ``loramux serve --tuning``.

    Takes some minutes. What is found is written shape by shape.
    """
    if (base is None) == (shape is None):
        raise typer.BadParameter("name a BASE or a --shape, and not both")
    setup_logging()

    from loramux.worker import tune as worker  # loads torch

    started = time.perf_counter()
    try:
        gpu = worker.gpu_name()
        file = out or Path(file_name(gpu))
        table = _table_in(file, gpu)
        cases = worker.Cases(
            shapes=worker.shapes_named(shape) if shape else worker.shapes_of_base(base or ""),
            ranks=rank or [16, 64],
            rows=rows or [numbers[-1] for numbers in ROW_BUCKETS.values()],
            num_slots=max_loras,
        )
        typer.echo(f"{'microseconds added':>108}  (by the rule)")
        for found in worker.tune(cases, _print):
            table = table.updated(found)
            write_table(table, file)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - started
    typer.echo(f"{file} has {len(table.entries)} entries for {gpu} after {seconds:.0f} s")


def _table_in(file: Path, gpu: str) -> Table:
    """What a file holds already, if there is one. Raises ConfigError."""
    if not file.exists():
        return Table(gpu, date="", versions={}, entries=())
    table = read_table(file)
    if table.gpu != gpu:
        raise ConfigError(
            f"the tuning table {file} is for {table.gpu!r} and this GPU is {gpu!r}: name another "
            "file by --out"
        )
    return table


def _print(entry: Entry, rule: float | None) -> None:
    """One line for each entry as it is found."""
    tiles, measured = entry.tiles, entry.measured
    if measured is None:
        typer.echo(f"{entry.key!s:69} no tiles fit this GPU: left to the rule")
        return
    chosen = (
        f"{tiles.split_k}x{tiles.block_k} s{tiles.shrink_stages}, {tiles.expand_tiles}x"
        f"{tiles.block_n} s{tiles.expand_stages} w{tiles.expand_warps}"
    )
    line = f"{entry.key!s:69} {chosen:24} {measured:12.2f}"
    typer.echo(line if rule is None else f"{line}  ({rule:.2f})")
