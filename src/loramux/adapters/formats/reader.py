"""Chooses the format of an adapter directory, by the weight file that is in it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from loramux.adapters.formats import mlx, peft
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

_READERS = {
    PEFT_FILE: partial(peft.read_peft, weight_file=PEFT_FILE),
    TORCH_FILE: partial(peft.read_peft, weight_file=TORCH_FILE),
    MLX_FILE: mlx.read_mlx,
}

_OTHER_WEIGHT_FILES = {
    "adapters.npz": "of an old mlx-lm adapter: convert it to adapters.safetensors",
    "adapter_model.safetensors.index.json": "the index of a sharded file: save it as one file",
    "adapter_model.bin.index.json": "the index of a sharded file: save it as one file",
    "model_weights.ckpt": "of a NeMo adapter: export it to the PEFT format",
}


def read_adapter(
    name: str, directory: Path, base: BaseLayout, *, max_rank: int, lenient: bool = False
) -> LoadedAdapter:
    """Read and check the adapter in ``directory`` for ``base``, in whatever format it is.

    ``name`` is only used in errors; ``lenient``: unknown fields of the configuration that are set
    are warnings. Raises AdapterRefused, with all that is wrong.
    """
    weight_file = weight_file_of(directory)
    if weight_file is not None:
        read = _READERS[weight_file]
        return read(name, directory, base, max_rank=max_rank, lenient=lenient)
    report = Report(lenient=lenient)
    read_config(directory, report)
    report.refuse(f"the weights are missing: none of {', '.join(WEIGHT_FILES)} is there")
    for file, remedy in _found_others(directory).items():
        report.refuse(f"{printable(file)} is {remedy}")
    report.raise_if_refused(name)
    raise AssertionError("missing weights were refused")


def _found_others(directory: Path) -> dict[str, str]:
    """Weight files in formats that are not read, with the remedy for each."""
    found = {
        name: remedy
        for name, remedy in _OTHER_WEIGHT_FILES.items()
        if os.path.lexists(directory / name)
    }
    archive = next(directory.glob("*.nemo"), None)
    if archive is not None:
        found[archive.name] = "a NeMo archive: export it to the PEFT format"
    return found
