"""What the files of an adapter say before a number is read, in any format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from loramux.adapters.formats import mlx_config, nemo_config, peft_config
from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.meaning import Meaning
from loramux.adapters.formats.nemo_files import find_files, is_nemo
from loramux.adapters.formats.nemo_keys import translate
from loramux.adapters.formats.safetensors_header import TensorEntry
from loramux.adapters.formats.torch_header import read_header_at
from loramux.adapters.formats.weight_files import MLX_FILE, read_entries, weight_file_of
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout

_NO_BASE = BaseLayout("its base", {})


@dataclass(frozen=True)
class Overview:
    """None: not said, or not in a way that can be used."""

    format: Literal["peft", "mlx", "nemo"]
    meaning: Meaning | None
    rank: int | None = None
    alpha: float | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    entries: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Tensors by PEFT's names and in PEFT's shapes; none where the file is unreadable."""
    num_bytes: int | None = None
    """Of all tensors as they are stored."""


def read_overview(path: Path, report: Report) -> Overview:
    """Look at an adapter's folder or archive; findings about its configuration go to ``report``."""
    weight_file = weight_file_of(path)
    if weight_file is None and is_nemo(path):
        return _nemo(path, report)
    told = _mlx(path, report) if weight_file == MLX_FILE else _peft(path, report)
    if weight_file is None:
        return told
    try:
        entries = read_entries(path / weight_file)
    except MalformedFile:  # which the reader refuses
        return told
    return replace(told, entries=entries, num_bytes=_num_bytes(entries))


def _peft(path: Path, report: Report) -> Overview:
    config = peft_config.read_config(path, report)
    if config is None:
        return Overview("peft", None)
    return Overview("peft", config, config.rank, config.alpha, config.use_rslora, config.use_dora)


def _mlx(path: Path, report: Report) -> Overview:
    config = mlx_config.read_config(path, report)
    if config is None:
        return Overview("mlx", None, use_rslora=False)
    alpha = config.scale * config.rank
    return Overview("mlx", config, config.rank, alpha, use_rslora=False, use_dora=config.use_dora)


def _nemo(path: Path, report: Report) -> Overview:
    told = Overview("nemo", None, use_rslora=False, use_dora=False)
    try:
        files = find_files(path)
        config = None if files.config is None else nemo_config.read_config(files.config, report)
        if config is not None:
            told = replace(told, meaning=config, rank=config.rank, alpha=config.alpha)
        if files.weights is not None:
            stored = read_header_at(files.weights.name, files.weights.path, files.weights.record)
            told = replace(told, num_bytes=_num_bytes(stored))
            if config is not None:
                found = translate(stored, config, _NO_BASE, Report())
                told = replace(told, entries={name: piece.entry for name, piece in found.items()})
    except MalformedFile:  # the same
        pass
    return told


def _num_bytes(entries: Mapping[str, TensorEntry]) -> int | None:
    return sum(entry.end - entry.start for entry in entries.values()) if entries else None
