"""Command-line options out of the option dataclasses, so that each is written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from loramux.errors import ConfigError


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command whose type is a dataclass by one option per field.

    Nested dataclasses are taken apart too. The command receives them put together again; what they
    refuse is a usage error. Field names must not repeat within one command.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, given in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _parameters(hints[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(given.replace(annotation=hints[name], kind=kind))

    def flat(**values: Any) -> None:
        built = {name: build(options, values) for name, options in groups.items()}
        own = {name: value for name, value in values.items() if name in hints}
        command(**own, **built)

    flat.__doc__ = command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    flat.__annotations__ = {p.name: p.annotation for p in parameters}
    return flat


def build(options: type, values: Mapping[str, Any]) -> Any:
    """An ``options`` dataclass from values by field name. Raises BadParameter."""
    hints = get_type_hints(options)
    arguments = {
        f.name: build(hints[f.name], values) if is_dataclass(hints[f.name]) else values[f.name]
        for f in fields(options)
    }
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    try:
        return options(**arguments)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def parse_adapters(values: Sequence[str]) -> dict[str, str]:
    """``NAME=SOURCE`` words as a mapping, in their order. Raises BadParameter."""
    adapters: dict[str, str] = {}
    for value in values:
        name, equals, source = value.partition("=")
        if not (name and equals and source):
            raise typer.BadParameter(f"--adapter {value!r}: write NAME=SOURCE")
        if name in adapters:
            raise typer.BadParameter(f"--adapter {value!r}: the name {name!r} is given twice")
        adapters[name] = source
    return adapters


def name_adapters(values: Sequence[str]) -> dict[str, str]:
    """The same for ``[NAME=]SOURCE``; what has no name is called like the last part of its path."""
    adapters: dict[str, str] = {}
    for value in values:
        name, equals, source = value.partition("=")
        if not equals or "/" in name:  # a sign of equality inside a path
            name, source = Path(value).absolute().name, value
        if not (name and source):
            raise typer.BadParameter(f"{value!r}: write [NAME=]SOURCE")
        if name in adapters:
            raise typer.BadParameter(f"{value!r}: the name {name!r} is there twice, give another")
        adapters[name] = source
    return adapters


def _parameters(options: type) -> Iterator[inspect.Parameter]:
    """One keyword parameter for each field of ``options`` and of the dataclasses inside."""
    panel = (inspect.getdoc(options) or options.__name__).splitlines()[0].rstrip(".")
    hints = get_type_hints(options)
    for f in fields(options):
        hint = hints[f.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _parameters(hint)
            continue
        flag = "--" + f.name.replace("_", "-")
        if hint is bool:
            flag += "/--no-" + flag.removeprefix("--")
        option = typer.Option(flag, help=f.metadata["help"], rich_help_panel=panel)
        default: Any = f.default
        if get_origin(hint) is tuple:  # a tuple would be one option with a fixed number of words
            hint, default = list[get_args(hint)[0]], list(default)
        yield inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint, option],
        )
