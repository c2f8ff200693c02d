"""The work of ``loramux convert``: an adapter of any format that is read, written in another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loramux.adapters.formats.overview import read_overview
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.formats.write_mlx import write_mlx
from loramux.adapters.formats.write_peft import write_peft
from loramux.adapters.identity import adapter_id
from loramux.adapters.loaded import LoadedAdapter, refuse_leftovers
from loramux.adapters.new_folder import new_folder
from loramux.adapters.plain import plain_modules
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout
from loramux.types import AdapterId

Format = Literal["peft", "mlx"]

ANY_RANK = 2**31
"""What a server accepts is its own matter."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    adapter_id: AdapterId
    num_modules: int
    warnings: tuple[str, ...]


def convert(source: Path, target: Path, base: BaseLayout, to: Format) -> Converted:
    """Write the adapter at ``source`` as the folder ``target``, without any loss.

    What was written is read again, and is the same adapter by its id. Raises AdapterRefused when
    the adapter cannot be served on ``base`` or not be said in the format, with every reason.
    """
    loaded = read_adapter(source.name, source, base, max_rank=ANY_RANK)
    modules = plain_modules(loaded, base)
    told = read_overview(source, Report())
    trained_on = (told.meaning.base_model if told.meaning else None) or base.name
    report = Report()
    refuse_leftovers(loaded, report)
    with new_folder(target) as folder:
        if to == "mlx":
            write_mlx(folder, modules, trained_on=trained_on, report=report)
        else:
            use_rslora = bool(told.use_rslora)
            write_peft(
                folder,
                modules,
                base,
                trained_on=trained_on,
                use_rslora=use_rslora,
                report=report,
            )
        report.raise_if_refused(source.name)
        written = read_adapter(source.name, folder, base, max_rank=ANY_RANK)
        assert _id(written) == _id(loaded), "what was written is another adapter"
    return Converted(_id(loaded), len(modules), loaded.spec.warnings)


def _id(adapter: LoadedAdapter) -> AdapterId:
    return adapter_id(adapter.spec, adapter.tensors)
