"""``loramux convert``: an adapter in another format, or folded into its base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from safetensors import SafetensorError

from loramux.adapters.new_folder import check_target, new_folder
from loramux.adapters.sources import AdapterSources
from loramux.cli.options import with_options
from loramux.cli.plain_text import harmless
from loramux.config import SourceOptions
from loramux.errors import AdapterError, AdapterRefused, ConfigError

if TYPE_CHECKING:
    from loramux.adapters.spec import BaseLayout


@with_options
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The adapter, in any format that is served.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    base: Annotated[
        str, typer.Option(metavar="BASE", help="Directory of the base model that it is for.")
    ],
    to: Annotated[
        Literal["peft", "mlx"] | None, typer.Option(help="Format to write; default: peft.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write BASE with the adapter folded into its weights.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, where it is what this command writes.")
    ] = False,
    *,
    sources: SourceOptions,
) -> None:
    """Write the adapter SOURCE in another format, or BASE with it folded in, to the folder OUT.

    The exit code is 0 when OUT is written, 1 if the adapter is refused, 2 for wrong use.
    """
    if merge and to is not None:
        raise typer.BadParameter("--merge writes a whole model: leave --to out")
    try:
        with AdapterSources(sources).open(source, source) as path:
            out = out.expanduser().absolute()
            folder = Path(base).expanduser()
            marker = "config.json" if merge else "adapter_config.json"
            check_target(out, force=force, marker=marker, inputs=[path, folder])
            layout = _layout(base)
            if merge:
                _merge(path, out, folder, layout)
            else:
                _convert(path, out, layout, to or "peft")
    except AdapterRefused as refusal:
        typer.echo(f"refused on {base}")
        _echo_list(refusal.reasons)
        raise typer.Exit(1) from None
    except (AdapterError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    except (OSError, SafetensorError) as error:
        typer.echo(f"error: {out} cannot be written: {error}", err=True)
        raise typer.Exit(1) from None


def _layout(base: str) -> BaseLayout:
    """Raises ConfigError or ModelNotServable."""
    import transformers  # loads torch

    from loramux.model.blueprint import draw

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return draw(base).layout


def _convert(path: Path, out: Path, layout: BaseLayout, to: Literal["peft", "mlx"]) -> None:
    from loramux.adapters import conversion

    done = conversion.convert(path, out, layout, to)
    typer.echo(f"{out}: {to}, {done.num_modules} modules, adapter id {done.adapter_id[:16]}")
    _echo_list(done.warnings)


def _merge(path: Path, out: Path, base: Path, layout: BaseLayout) -> None:
    from loramux.adapters.conversion import ANY_RANK
    from loramux.adapters.formats.reader import read_adapter
    from loramux.model import merge

    adapter = read_adapter(path.name, path, layout, max_rank=ANY_RANK)
    model = merge.merge(str(base), adapter, path.name)
    with new_folder(out) as folder:
        merge.save(model, base, folder)
    typer.echo(f"{out}: {layout.name} with the adapter in {len(adapter.spec.by_module())} modules")
    _echo_list(adapter.spec.warnings)


def _echo_list(sentences: tuple[str, ...]) -> None:
    for sentence in sentences:
        typer.echo(f"  - {harmless(sentence)}")
