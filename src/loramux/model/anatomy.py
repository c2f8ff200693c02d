"""What a base model is made of, found by one forward pass instead of a list of architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loramux.adapters.experts import expert_modules
from loramux.adapters.fusions import find_fusions
from loramux.adapters.spec import BaseLayout, ExpertsShape, HeadCounts, ModuleShape
from loramux.errors import ModelNotServable
from loramux.lora.weights import ModuleTable
from loramux.model.attention_seam import IMPLEMENTATION, AttentionSeam, Recorder
from loramux.model.experts import find_experts, find_routers
from loramux.model.load import BaseModel
from loramux.model.stack import decoder_layers, recorded_calls, runs_of
from loramux.ops.attention import AttentionLayer

_PROBE_TOKENS = 5


@dataclass(frozen=True)
class Anatomy:
    """Attention layers, the modules that can take LoRA, and those with values to replace."""

    attention: dict[int, AttentionLayer]
    modules: ModuleTable
    """The linears of the layers; then embedding and head, where adapters may change them; then
    every projection of every expert."""
    sites: tuple[tuple[int, ...], ...]
    """Modules (rows of the table) that run as one linear: consecutive rows, in order of calls."""
    runs: tuple[tuple[int, ...], ...]
    """Decoder layers that may run as one module (``model.stack``)."""
    norms: Mapping[str, int]
    """Modules that scale each token's vectors by a weight, and the dimension of their input in
    which the tokens are."""
    layout: BaseLayout
    num_ends: int
    """Embedding and head among the modules, behind the linears."""

    @property
    def layer_shapes(self) -> tuple[ModuleShape, ...]:
        """Of the linears in the layers, which stand first in the table."""
        return self.modules.shapes[: sum(map(len, self.sites))]

    @property
    def expert_shapes(self) -> tuple[ModuleShape, ...]:
        """Of the projections of all experts, which stand last."""
        return self.modules.shapes[len(self.layer_shapes) + self.num_ends :]


def examine(base: BaseModel, seam: AttentionSeam) -> Anatomy:
    """Run a few tokens through the model and note what happened. Raises ModelNotServable.

    A linear can take LoRA if it sees every token of the step exactly once, so that its rows are
    those of the routing; the same holds for embedding and norms. The head sees rows of its own.
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
    norms = {name: module for name, module in model.named_modules() if could_be_norm(module)}
    ends = adaptable_ends(model)
    calls: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(_recorder(calls, name))
        for name, module in (linears | norms | ends).items()
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
    called = [n for n in calls if n in linears and _saw_every_token_once(calls[n])]
    groups = _groups(called, linears, calls)
    called_once = [name for name in ends if len(calls.get(name, ())) == 1]
    names = (*(name for group in groups for name in group), *called_once)
    shapes = tuple(module_shape(model.get_submodule(name)) for name in names)
    scaling = {n: at for n in norms if (at := _tokens_at(calls.get(n, ()))) is not None}
    layout = layout_of(
        base,
        dict(zip(names, shapes, strict=True)),
        recorder.layers,
        tuple(scaling),
        experts=find_experts(model, any_gate=model.device.type != "cuda"),
    )
    return Anatomy(
        attention=recorder.layers,
        modules=ModuleTable(tuple(layout.modules), tuple(layout.modules.values())),
        sites=_rows(groups),
        runs=runs_of(layer_calls),
        norms=scaling,
        layout=layout,
        num_ends=len(called_once),
    )


def could_be_norm(module: nn.Module) -> bool:
    """Whether all that a module has is vectors called weight and bias."""
    parameters = dict(module.named_parameters())
    return (
        "weight" in parameters
        and parameters.keys() <= {"weight", "bias"}
        and not list(module.children())
        and all(p.dim() == 1 for p in parameters.values())
    )


def _tokens_at(inputs: Sequence[Tensor]) -> int | None:
    """The dimension in which a norm that was called once saw the tokens; None if it is in doubt.

    The last one is the vectors' own.
    """
    if len(inputs) != 1 or inputs[0].dim() < 3 or inputs[0].shape[0] != 1:
        return None
    found = [d for d, size in enumerate(inputs[0].shape[:-1]) if size == _PROBE_TOKENS]
    return found[0] if len(found) == 1 else None


def adaptable_ends(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Embedding and head by name, as far as adapters may change them: those of no unusual kind."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if module is head and type(head) is nn.Linear:
            found[name] = module
        elif module is embedding and isinstance(module, nn.Embedding):
            # Subclasses may do anything; those of transformers that scale say so by this name.
            usual = type(module) is nn.Embedding or hasattr(module, "embed_scale")
            if usual and module.max_norm is None:
                found[name] = module
    return found


def embedding_scale(module: nn.Embedding) -> Tensor | None:
    """What an embedding multiplies its rows by; None for 1."""
    scale = getattr(module, "embed_scale", None)
    return None if scale is None else torch.as_tensor(scale)


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
    return weight.t() if isinstance(module, Conv1D | nn.Embedding) else weight


def layout_of(
    base: BaseModel,
    modules: Mapping[str, ModuleShape],
    attention: Mapping[int, AttentionLayer],
    norms: Sequence[str],
    *,
    experts: Mapping[str, ExpertsShape],
) -> BaseLayout:
    """These modules of the base, then those of experts, which are no modules of transformers, and
    all that hangs on their names and on its family.

    ``norms``: others whose parameters adapters may replace.
    """
    routers = find_routers(base.model, experts)
    everything = frozenset(name for name, _ in base.model.named_modules() if name)
    model_type = base.model.config.get_text_config().model_type
    qkv_rows = {number: _qkv_rows(layer) for number, layer in attention.items()}
    embedding: Any = base.model.get_input_embeddings()
    head: Any = base.model.get_output_embeddings()
    names = {module: name for name, module in base.model.named_modules() if name in modules}
    return BaseLayout(
        base.name,
        {**modules, **dict(expert_modules(experts))},
        everything - modules.keys(),
        model_type,
        find_fusions(model_type, modules, qkv_rows),
        heads={
            n: HeadCounts(layer.num_heads, layer.kv.num_kv_heads) for n, layer in attention.items()
        },
        replaceable={name: _parameters(base, name) for name in (*modules, *norms, *routers)},
        embedding=names.get(embedding),
        head=names.get(head),
        tied=embedding.weight is head.weight,
        experts=experts,
        routers=routers,
    )


def _parameters(base: BaseModel, name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's weight and bias."""
    parameters = base.model.get_submodule(name).named_parameters(recurse=False)
    return {leaf: tuple(p.shape) for leaf, p in parameters if leaf in ("weight", "bias")}


def _qkv_rows(layer: AttentionLayer) -> tuple[int, int, int]:
    """Outputs of q, k and v together over all heads."""
    kv = layer.kv
    return (
        layer.num_heads * kv.key_dim,
        kv.num_kv_heads * kv.key_dim,
        kv.num_kv_heads * kv.value_dim,
    )


def module_shape(module: nn.Module) -> ModuleShape:
    """The shape of a module that can take LoRA; an embedding reads one-hot vectors."""
    if isinstance(module, nn.Embedding):
        return ModuleShape(module.num_embeddings, module.embedding_dim)
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
