"""A base model without its weights: which modules take LoRA, and norms of single weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loramux.adapters.formats.files import MalformedFile, parse_json_object, read_bounded
from loramux.adapters.formats.module_names import ModuleNames
from loramux.adapters.formats.safetensors_header import read_header
from loramux.adapters.spec import BaseLayout
from loramux.errors import ModelNotServable
from loramux.model.anatomy import (
    adaptable_ends,
    could_be_norm,
    examine,
    layout_of,
    linear_shape,
    module_shape,
)
from loramux.model.attention_seam import AttentionSeam
from loramux.model.experts import find_experts
from loramux.model.load import BaseModel, adopt, read_config, resolve_dtype
from loramux.model.stack import decoder_layers

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 2**20

_SHORTEST_CONTEXT = 1
"""No layout hangs on the length, and a base that is refused only when it is long is judged too."""


@dataclass(frozen=True)
class Blueprint:
    """What a directory's config.json says about the model that would be served from it."""

    layout: BaseLayout
    dtype: torch.dtype
    """In which the base, and so the adapters' blocks, are served by default."""
    examined: bool
    """Whether the modules were seen at work; if not, they are told by their names alone."""


def draw(path: str) -> Blueprint:
    """Build a model directory's architecture on the meta device, where tensors have no memory.

    The examination is that of a loaded base. Code that looks at values cannot run there; then all
    linears inside the decoder layers count, among them those of experts and routers. Raises
    ConfigError or ModelNotServable.
    """
    folder, config = read_config(path)
    dtype = resolve_dtype(config, "auto")  # before the model, which writes its own there
    try:
        with torch.device("meta"):
            # In bfloat16 whatever is served: grouped products of experts know no other there.
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.bfloat16
            )
    except (ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = f"it cannot be built as a causal model without its weights: {error}"
        raise ModelNotServable(folder, reason) from error
    assert isinstance(model, PreTrainedModel)
    base = adopt(folder, model, _SHORTEST_CONTEXT)
    try:
        return Blueprint(examine(base, AttentionSeam(model)).layout, dtype, examined=True)
    except RuntimeError:  # an operator that has no meta version, or a value that is asked for
        return Blueprint(_layout_by_names(base), dtype, examined=False)


def _layout_by_names(base: BaseModel) -> BaseLayout:
    stack = decoder_layers(base.model)
    inside: set[nn.Module] = set() if stack is None else set(stack[1].modules())
    named = base.model.named_modules()
    shapes = {name: linear_shape(module) for name, module in named if module in inside}
    modules = {name: shape for name, shape in shapes.items() if shape is not None}
    modules |= {name: module_shape(end) for name, end in adaptable_ends(base.model).items()}
    norms = [name for name, module in base.model.named_modules() if could_be_norm(module)]
    return layout_of(base, modules, {}, norms, experts=find_experts(base.model, any_gate=True))


class StoredWeights:
    """Norms of a base's weights, each read when it is asked for out of the safetensors files."""

    def __init__(self, folder: Path, layout: BaseLayout) -> None:
        self._layout = layout
        names = ModuleNames(layout)
        self._opened: dict[Path, safe_open] = {}  # to open one reads all of its header
        self._places: dict[str, tuple[Path, str]] = {}
        for key, file in _files(folder).items():
            # Files may spell a module without the model's own prefix, as adapters may.
            module = names.find(key.removesuffix(".weight")) if key.endswith(".weight") else None
            if module is not None:
                self._places[module] = file, key

    def norm(self, module: str) -> float | None:
        """Frobenius norm; None unless the file holds this weight in full, in floating point."""
        if module not in self._places:
            return None
        path, key = self._places[module]
        try:
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt", device="cpu")
            weight: torch.Tensor = self._opened[path].get_tensor(key)
        except (OSError, SafetensorError):
            return None
        shape = self._layout.modules[module]
        if (
            not weight.is_floating_point()
            or weight.numel() != shape.in_features * shape.out_features
        ):
            return None
        return float(torch.linalg.vector_norm(weight.float()))


def _files(folder: Path) -> Mapping[str, Path]:
    """Which file holds which tensor; empty where there are no safetensors that can be read."""
    try:
        if (folder / _WEIGHTS).exists():
            return dict.fromkeys(read_header(folder / _WEIGHTS), folder / _WEIGHTS)
        index = parse_json_object(_INDEX, read_bounded(folder / _INDEX, _MAX_INDEX_BYTES))
    except MalformedFile:
        return {}
    table = index.get("weight_map")
    if not isinstance(table, dict):
        return {}
    return {key: folder / file for key, file in table.items() if isinstance(file, str)}
