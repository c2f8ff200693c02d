"""What a base model is made of, found by one forward pass instead of a list of architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from loramux.adapters.fusions import find_fusions
from loramux.adapters.spec import BaseLayout, HeadCounts, ModuleShape
from loramux.errors import ModelNotServable
from loramux.lora.weights import ModuleTable
from loramux.model.attention_seam import IMPLEMENTATION, AttentionSeam, Recorder
from loramux.model.load import BaseModel
from loramux.model.stack import decoder_layers, recorded_calls, runs_of
from loramux.ops.attention import AttentionLayer

_PROBE_TOKENS = 5


@dataclass(frozen=True)
class Anatomy:
    """Attention layers and the linears that can take LoRA."""

    attention: dict[int, AttentionLayer]
    modules: ModuleTable
    sites: tuple[tuple[int, ...], ...]
    """Modules (rows of the table) that run as one linear: consecutive rows, in order of calls."""
    runs: tuple[tuple[int, ...], ...]
    """Decoder layers that may run as one module (``model.stack``)."""
    layout: BaseLayout


def examine(base: BaseModel, seam: AttentionSeam) -> Anatomy:
    """Run a few tokens through the model and note what happened. Raises ModelNotServable.

    A linear can take LoRA if it lies inside the layers, is no output head and sees every token of
    the step exactly once: only then are its rows those of the routing.
    """
    model = base.model
    recorder = Recorder(base.name)
    seam.connect(lambda layer: partial(recorder, layer))
    seam.use(IMPLEMENTATION)
    linears = {
        name: module
        for name, module in model.named_modules()
        if linear_shape(module) is not None and module is not model.get_output_embeddings()
    }
    calls: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(_recorder(calls, name)) for name, module in linears.items()
    ]
    stack = decoder_layers(model)
    layers = [] if stack is None else list(stack[1])
    try:
        tokens = torch.arange(_PROBE_TOKENS, device=model.device)[None] % base.vocab_size
        with torch.inference_mode(), recorded_calls(layers) as layer_calls:
            positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(recorder.layers) != list(range(num_layers)):
        raise ModelNotServable(
            base.name,
            f"{len(recorder.layers)} of its {num_layers} layers use transformers' attention "
            "interface; the others keep a state of their own, which paged attention cannot hold",
        )
    called = [name for name in calls if _saw_every_token_once(calls[name])]
    groups = _groups(called, linears, calls)
    names = tuple(name for group in groups for name in group)
    shapes = tuple(_shape(linears[name]) for name in names)
    return Anatomy(
        attention=recorder.layers,
        modules=ModuleTable(names, shapes),
        sites=_rows(groups),
        runs=runs_of(layer_calls),
        layout=layout_of(base, dict(zip(names, shapes, strict=True)), recorder.layers),
    )


def linear_shape(module: nn.Module) -> ModuleShape | None:
    """The shape of a linear, or None for anything else."""
    if isinstance(module, nn.Linear):
        return ModuleShape(module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        return ModuleShape(module.nx, module.nf)
    return None


def linear_weight(module: nn.Module) -> Tensor:
    """The weight as ``[out, in]``, whichever way the module stores it."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def layout_of(
    base: BaseModel,
    modules: Mapping[str, ModuleShape],
    attention: Mapping[int, AttentionLayer],
) -> BaseLayout:
    """These modules of the base, and all that hangs on their names and on its family."""
    everything = frozenset(name for name, _ in base.model.named_modules() if name)
    model_type = base.model.config.get_text_config().model_type
    qkv_rows = {number: _qkv_rows(layer) for number, layer in attention.items()}
    return BaseLayout(
        base.name,
        modules,
        everything - modules.keys(),
        model_type,
        find_fusions(model_type, modules, qkv_rows),
        {n: HeadCounts(layer.num_heads, layer.kv.num_kv_heads) for n, layer in attention.items()},
    )


def _qkv_rows(layer: AttentionLayer) -> tuple[int, int, int]:
    """Outputs of q, k and v together over all heads."""
    kv = layer.kv
    return (
        layer.num_heads * kv.key_dim,
        kv.num_kv_heads * kv.key_dim,
        kv.num_kv_heads * kv.value_dim,
    )


def _shape(module: nn.Module) -> ModuleShape:
    shape = linear_shape(module)
    assert shape is not None
    return shape


def _recorder(calls: dict[str, list[Tensor]], name: str) -> Any:
    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.setdefault(name, []).extend(args[:1])

    return record


def _saw_every_token_once(inputs: Sequence[Tensor]) -> bool:
    return len(inputs) == 1 and inputs[0].shape[:-1].numel() == _PROBE_TOKENS


def _groups(
    names: Sequence[str], linears: Mapping[str, nn.Module], calls: Mapping[str, Sequence[Tensor]]
) -> list[list[str]]:
    """Plain linears of one parent that were called with the very same tensor run as one."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        fusible = type(linears[name]) is nn.Linear
        parent = name.rpartition(".")[0] if fusible else name
        groups.setdefault((parent, id(calls[name][0])), []).append(name)
    return list(groups.values())


def _rows(groups: Sequence[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """The rows that each group's members have in the module table, one after another."""
    ends = list(accumulate(map(len, groups)))
    return tuple(
        tuple(range(end - len(group), end)) for group, end in zip(groups, ends, strict=True)
    )
