"""Chooses the format of an adapter, by the weight file that is in its directory."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from loramux.adapters.formats import mlx, nemo, peft
from loramux.adapters.formats.load import CheckedAdapter
from loramux.adapters.formats.nemo_files import is_nemo
from loramux.adapters.formats.peft_config import read_config
from loramux.adapters.formats.weight_files import (
    MLX_FILE,
    PEFT_FILE,
    TORCH_FILE,
    WEIGHT_FILES,
    weight_file_of,
)
from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.report import Report, printable
from loramux.adapters.spec import BaseLayout

_CHECKS = {
    PEFT_FILE: partial(peft.check_peft, weight_file=PEFT_FILE),
    TORCH_FILE: partial(peft.check_peft, weight_file=TORCH_FILE),
    MLX_FILE: mlx.check_mlx,
}

_OTHER_WEIGHT_FILES = {
    "adapters.npz": "of an old mlx-lm adapter: convert it to adapters.safetensors",
    "adapter_model.safetensors.index.json": "the index of a sharded file: save it as one file",
    "adapter_model.bin.index.json": "the index of a sharded file: save it as one file",
}


def read_adapter(
    name: str, directory: Path, base: BaseLayout, *, max_rank: int, lenient: bool = False
) -> LoadedAdapter:
    """Read and check the adapter in ``directory`` for ``base``, in whatever format it is.

    ``directory`` may be an archive of NeMo as well. ``name`` is only used in errors; ``lenient``:
    unknown fields of the configuration that are set are warnings. Raises AdapterRefused, with all
    that is wrong.
    """
    return check_adapter(name, directory, base, max_rank=max_rank, lenient=lenient).read()


def check_adapter(
    name: str, directory: Path, base: BaseLayout, *, max_rank: int, lenient: bool = False
) -> CheckedAdapter:
    """The first half of ``read_adapter``, with everything but the numbers."""
    weight_file = weight_file_of(directory)
    if weight_file is not None:
        check = _CHECKS[weight_file]
        return check(name, directory, base, max_rank=max_rank, lenient=lenient)
    if is_nemo(directory):
        return nemo.check_nemo(name, directory, base, max_rank=max_rank, lenient=lenient)
    report = Report(lenient=lenient)
    read_config(directory, report)
    report.refuse(f"the weights are missing: none of {', '.join(WEIGHT_FILES)} is there")
    for file, remedy in _found_others(directory).items():
        report.refuse(f"{printable(file)} is {remedy}")
    report.raise_if_refused(name)
    raise AssertionError("missing weights were refused")


def _found_others(directory: Path) -> dict[str, str]:
    """Weight files in formats that are not read, with the remedy for each."""
    return {
        name: remedy
        for name, remedy in _OTHER_WEIGHT_FILES.items()
        if os.path.lexists(directory / name)
    }
