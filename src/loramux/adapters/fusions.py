"""Linears that are one in some models and several in others, and the order of their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loramux.adapters.spec import Fusion, ModuleShape

QKV, GATE_UP = "qkv_proj", "gate_up_proj"

_PARTS: Mapping[str, tuple[str, ...]] = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    GATE_UP: ("gate_proj", "up_proj"),
}

_SPLIT_FAMILIES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "olmo3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
    }
)
"""transformers holds these split. Their fused form is that of the runtimes which fuse them: whole
projections one after another, gate before up (Phi-3 and Llama checkpoints are converted so)."""

_KNOWN_ORDER: Mapping[str, frozenset[str]] = {
    QKV: _SPLIT_FAMILIES | {"phi3"},
    GATE_UP: _SPLIT_FAMILIES | {"phi3", "glm", "glm4"},
}
"""Model types whose fused linear holds its parts as ``_PARTS`` says. For those that transformers
holds fused, its modelling code says so; CodeGen's qkv_proj, for one, is q, v, k in four pieces."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def find_fusions(
    model_type: str,
    modules: Mapping[str, ModuleShape],
    qkv_rows: Mapping[int, tuple[int, int, int]],
) -> tuple[Fusion, ...]:
    """Fused linears among ``modules``, and groups of them that others have as a fused one.

    ``qkv_rows``: outputs of q, k and v in each layer, as attention sees them; only they tell the
    sizes inside a fused linear.
    """
    parents = dict.fromkeys(name.rpartition(".")[0] for name in modules)
    found = (
        _fusion(model_type, modules, qkv_rows, parent, leaf)
        for parent in parents
        for leaf in _PARTS
    )
    return tuple(fusion for fusion in found if fusion is not None)


def _fusion(
    model_type: str,
    modules: Mapping[str, ModuleShape],
    qkv_rows: Mapping[int, tuple[int, int, int]],
    parent: str,
    leaf: str,
) -> Fusion | None:
    name = f"{parent}.{leaf}"
    parts = tuple(f"{parent}.{part}" for part in _PARTS[leaf])
    shapes = [modules[part] for part in parts if part in modules]
    fused = modules.get(name)
    if fused is not None and not shapes:
        inputs = {fused.in_features}
        sizes = _sizes_inside(name, leaf, qkv_rows, fused.out_features)
    elif fused is None and len(shapes) == len(parts):
        inputs = {shape.in_features for shape in shapes}
        sizes = tuple(shape.out_features for shape in shapes)
    else:
        return None
    if len(inputs) > 1 or sizes is None or (leaf == GATE_UP and sizes[0] != sizes[1]):
        return None
    return Fusion(name, parts, sizes, inputs.pop(), model_type in _KNOWN_ORDER[leaf])


def _sizes_inside(
    name: str, leaf: str, qkv_rows: Mapping[int, tuple[int, int, int]], out_features: int
) -> tuple[int, ...] | None:
    if leaf == GATE_UP:
        sizes = (out_features // 2, out_features // 2)
    else:
        layer = _LAYER.search(name)
        sizes = None if layer is None else qkv_rows.get(int(layer[1]))
    return sizes if sizes is not None and sum(sizes) == out_features else None
