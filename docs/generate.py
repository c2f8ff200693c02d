"""Write docs/configuration.md from the option dataclasses: ``scripts/docs``."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path

from loramux import config

TARGET = Path(__file__).with_name("configuration.md")

GROUPS = (
    config.ModelOptions,
    config.AdapterOptions,
    config.SourceOptions,
    config.SchedulerOptions,
    config.ServerOptions,
)

HEAD = """\
# Configuration

<!-- Generated from src/loramux/config.py by scripts/docs: change it there. -->

Each option is a field of a frozen dataclass in `loramux.config` and a flag of the command line.
An unknown flag, an unknown field and a value that cannot work are errors. Sizes are numbers of
bytes with an optional unit: `512MiB`, `8GB`, `1073741824`.

`loramux serve` and `loramux generate` take the flags of the model, the adapters, their sources and
the scheduler, `loramux serve` those of the server as well, `loramux inspect` those of the sources.
In Python all but the server's go into an `EngineOptions` as `model`, `adapters`, `sources` and
`scheduler`.

The environment variable `LORAMUX_LOG` is `DEBUG`, `INFO` (default), `WARNING` or `ERROR`. Keys of
`loramux serve` may stand in `LORAMUX_API_KEY`, `LORAMUX_ADMIN_KEY` and the file `LORAMUX_KEYS`
([keys](serving.md#keys)). The clients of remote sources have variables of their own, such as
`HF_TOKEN` and `AWS_PROFILE`.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for group in GROUPS for line in _section(group))])


def _section(group: type) -> Iterator[str]:
    hints = typing.get_type_hints(group)
    yield f"## {group.__name__}"
    yield ""
    yield inspect.cleandoc(group.__doc__ or "")
    yield ""
    yield "| flag | field | type | default | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for option in fields(group):
        cells = (
            _flag(option.name, hints[option.name]),
            f"`{option.name}`",
            _type(hints[option.name]),
            _default(option),
        )
        yield f"| {' | '.join(cells)} | {option.metadata['help']} |"
    yield ""


def _flag(name: str, hint: object) -> str:
    words = name.replace("_", "-")
    return f"`--{words}`, `--no-{words}`" if hint is bool else f"`--{words}`"


def _type(hint: object) -> str:
    named = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    return " or ".join(t.__name__ for t in named if isinstance(t, type))


def _default(option: Field[object]) -> str:
    assert option.default is not MISSING, f"{option.name} has no default"
    return "" if option.default in (None, ()) else f"`{option.default}`"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
