"""Reads a LoRA adapter of NeMo: an archive, or the folder that one is in or was unpacked to.

Its tensors get PEFT's names and shapes before anything is checked, so that findings about them are
in these terms; the rows of a linear that is several in transformers go to each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.load import CheckedAdapter, WeightFile, check
from loramux.adapters.formats.nemo_config import read_config
from loramux.adapters.formats.nemo_files import NemoFile, find_files
from loramux.adapters.formats.nemo_keys import Piece, translate
from loramux.adapters.formats.tensors import read_torch
from loramux.adapters.formats.torch_header import TorchEntry, read_header_at
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout


def check_nemo(
    name: str, path: Path, base: BaseLayout, *, max_rank: int, lenient: bool = False
) -> CheckedAdapter:
    """Check the adapter at ``path`` for ``base``; its numbers are not read yet.

    ``name`` is only used in errors; ``lenient``: unknown fields are warnings. Raises
    AdapterRefused, with all that is wrong.
    """
    report = Report(lenient=lenient)
    config, weights = None, None
    try:
        files = find_files(path)
        for missing in files.missing():
            report.refuse(f"{missing} (NeMo) is missing")
        config = None if files.config is None else read_config(files.config, report)
        if files.weights is not None:
            stored = read_header_at(files.weights.name, files.weights.path, files.weights.record)
            if config is not None:
                found = translate(stored, config, base, report)
                weights = _weight_file(files.weights, stored, found)
    except MalformedFile as problem:
        report.refuse(str(problem))
    return check(name, config, weights, base, max_rank=max_rank, report=report)


def _weight_file(
    file: NemoFile, stored: Mapping[str, TorchEntry], found: Mapping[str, Piece]
) -> WeightFile:
    entries = {name: piece.entry for name, piece in found.items()}
    return WeightFile(entries, partial(_read_pieces, file, stored, found))


def _read_pieces(
    file: NemoFile, stored: Mapping[str, TorchEntry], found: Mapping[str, Piece]
) -> dict[str, Tensor]:
    used = dict.fromkeys(piece.stored_key for piece in found.values())
    tensors = read_torch(file.path, {key: stored[key] for key in used})
    return {name: _rows(tensors[piece.stored_key], piece.rows) for name, piece in found.items()}


def _rows(tensor: Tensor, rows: tuple[range, ...]) -> Tensor:
    if not rows:
        return tensor
    return torch.cat([tensor[group.start : group.stop] for group in rows])
