"""Reads an adapter of mlx-lm: its matrices are PEFT's transposed, its scale is a plain factor.

Tensors get PEFT's names and shapes (``mlx_keys``) before anything is checked, so that findings
about them are in these terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.load import CheckedAdapter, WeightFile, check
from loramux.adapters.formats.mlx_config import MlxConfig, count_layers, read_config
from loramux.adapters.formats.mlx_keys import PeftTensor, in_peft_terms
from loramux.adapters.formats.safetensors_header import SafetensorsFile, examine
from loramux.adapters.formats.tensors import read_safetensors
from loramux.adapters.formats.weight_files import MLX_FILE
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout

_EMBEDDINGS = frozenset({"embed_tokens", "wte"})
"""mlx-lm lets LoRA on a tied embedding act on the head as well, where PEFT does not."""


def check_mlx(
    name: str, directory: Path, base: BaseLayout, *, max_rank: int, lenient: bool
) -> CheckedAdapter:
    """Check the adapter in ``directory`` for ``base``; its numbers are not read yet.

    ``name`` is only used in errors. Raises AdapterRefused, with all that is wrong.
    """
    report = Report(lenient=lenient)
    config = read_config(directory, report)
    weights = None
    try:
        weights = _open_weights(directory / MLX_FILE, config, base, report)
    except MalformedFile as problem:
        report.refuse(str(problem))
    return check(name, config, weights, base, max_rank=max_rank, report=report)


def _open_weights(
    path: Path, config: MlxConfig | None, base: BaseLayout, report: Report
) -> WeightFile:
    stored = examine(path)
    num_layers = count_layers(base.modules)
    found: dict[str, PeftTensor] = {}
    for key in stored.entries:
        tensor = in_peft_terms(key, stored.entries)
        if tensor is None:
            report.refuse("tensors that LoRA of mlx-lm does not have", key)
            continue
        module = tensor.module
        if module.rpartition(".")[2] in _EMBEDDINGS:
            report.refuse("LoRA on an embedding is not served in this format", module)
            continue
        unused = config.why_unused(module, num_layers) if config is not None else None
        if unused is not None:
            report.refuse(unused, module)
        found[key] = tensor
    entries = {tensor.name: tensor.entry for tensor in found.values()}
    if len(entries) < len(found):
        report.refuse("duplicate: two tensors are meant for the same place")
    return WeightFile(entries, partial(_read, stored, found))


def _read(stored: SafetensorsFile, found: Mapping[str, PeftTensor]) -> dict[str, Tensor]:
    tensors = read_safetensors(stored)
    return {tensor.name: tensor.of(tensors[key]) for key, tensor in found.items()}
