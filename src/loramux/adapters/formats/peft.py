"""Reads a PEFT adapter directory: all of it exactly, or a refusal with every reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from loramux.adapters.formats import safetensors_header, torch_header
from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.load import CheckedAdapter, WeightFile, check
from loramux.adapters.formats.peft_config import read_config
from loramux.adapters.formats.shared_layout import read_shared_sides
from loramux.adapters.formats.tensors import read_safetensors, read_torch
from loramux.adapters.formats.weight_files import TORCH_FILE
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout


def check_peft(
    name: str, directory: Path, base: BaseLayout, *, max_rank: int, lenient: bool, weight_file: str
) -> CheckedAdapter:
    """Check the adapter in ``directory`` for ``base``; its numbers are not read yet.

    ``weight_file`` is ``weight_files.PEFT_FILE`` or ``TORCH_FILE``; ``name`` is only used in
    errors. Raises AdapterRefused, with all that is wrong.
    """
    report = Report(lenient=lenient)
    config = read_config(directory, report)
    shared = read_shared_sides(directory, report)
    weights = None
    try:
        weights = _open_weights(directory / weight_file)
    except MalformedFile as problem:
        report.refuse(str(problem))
    return check(name, config, weights, base, max_rank=max_rank, report=report, shared=shared)


def _open_weights(path: Path) -> WeightFile:
    if path.name == TORCH_FILE:
        entries = torch_header.read_header(path)
        return WeightFile(entries, partial(read_torch, path, entries))
    file = safetensors_header.examine(path)
    return WeightFile(file.entries, partial(read_safetensors, file))
