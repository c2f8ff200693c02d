"""The ``loramux`` command. Each command's module is imported only when it is called or listed.

Those modules import nothing heavy at their top (no torch, transformers or fastapi), so that help
comes at once.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from loramux import __version__
from loramux.errors import LoramuxError

COMMANDS = {
    "serve": "loramux.cli.serve:serve",
    "generate": "loramux.cli.generate:generate",
    "demo": "loramux.cli.demo:demo",
    "inspect": "loramux.cli.inspect:inspect",
    "convert": "loramux.cli.convert:convert",
    "verify": "loramux.cli.verify:verify",
    "tune": "loramux.cli.tune:tune",
}
"""Every command and the function behind it."""


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name].split(":")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(importlib.import_module(module), function))
        return typer.main.get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"loramux {__version__}")
        raise typer.Exit


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Serve many LoRA adapters over one base model at nearly the base model's speed."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 used wrongly."""
    try:
        typer.main.get_command(app)(arguments, prog_name="loramux")
    except LoramuxError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
