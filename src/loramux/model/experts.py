"""The experts of a mixture, as transformers' experts interface has them, and their routers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from loramux.adapters.experts import (
    DOWN,
    DOWN_PARAMETER,
    GATE,
    GATE_UP_PARAMETER,
    UP,
    inside,
)
from loramux.adapters.spec import ExpertsShape, ModuleShape
from loramux.lora.experts import out_first
from loramux.ops.expert_tiles import Mixture

IMPLEMENTATION = "loramux"

_ACTIVATIONS: dict[type, str] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
}


def find_experts(model: PreTrainedModel, *, any_gate: bool) -> dict[str, ExpertsShape]:
    """Modules with the experts of a layer, of the kind that can take LoRA: gated, with no norm
    behind them.

    ``any_gate``: whatever joins gate and up will do, and any layout of the weights, as in plain
    torch; else only what the kernels know.
    """
    found: dict[str, ExpertsShape] = {}
    for name, module in model.named_modules():
        interface: Any = module
        if (
            getattr(interface, "has_gate", False)
            and not getattr(interface, "has_post_expert_norm", False)
            and (any_gate or _known_to_kernels(interface))
            and (shape := _shape_of(interface)) is not None
        ):
            found[name] = shape
    return found


def _known_to_kernels(experts: Any) -> bool:
    return (
        experts.is_concatenated
        and not experts.is_transposed
        and not experts.has_bias
        and activation_of(experts) is not None
    )


def _shape_of(experts: Any) -> ExpertsShape | None:
    """None where the weights are not as transformers' interface has them."""
    gate_up, down = (
        getattr(experts, GATE_UP_PARAMETER, None),
        getattr(experts, DOWN_PARAMETER, None),
    )
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
        return None
    if gate_up.dim() != 3 or down.dim() != 3:
        return None
    num_experts, hidden, intermediate = out_first(down, experts).shape
    if out_first(gate_up, experts).shape != (num_experts, 2 * intermediate, hidden):
        return None
    return ExpertsShape(num_experts, hidden, intermediate, not experts.is_concatenated)


def find_routers(
    model: PreTrainedModel, experts: Mapping[str, ExpertsShape]
) -> dict[str, ModuleShape]:
    """Modules beside experts with a weight, and maybe a bias, for each; linears are none."""
    found: dict[str, ModuleShape] = {}
    for name, shape in experts.items():
        parent = name.rpartition(".")[0]
        for leaf, module in model.get_submodule(parent).named_children():
            parameters = dict(module.named_parameters())
            weight = parameters.get("weight")
            if (
                not isinstance(module, nn.Linear)
                and parameters.keys() <= {"weight", "bias"}
                and weight is not None
                and tuple(weight.shape) == (shape.num_experts, shape.hidden)
            ):
                found[f"{parent}.{leaf}"] = ModuleShape(shape.hidden, shape.num_experts)
    return found


def projection(experts: nn.Module, expert: int, part: str) -> Tensor:
    """The weight ``[out, in]`` of one projection of one expert: a view of that of all."""
    shape = _shape_of(experts)
    assert shape is not None
    parameter = DOWN_PARAMETER if part == DOWN else GATE_UP_PARAMETER
    weight = out_first(cast(Tensor, getattr(experts, parameter)), experts)[expert]
    rows = {GATE: shape.gate_rows, UP: shape.up_rows, DOWN: range(shape.hidden)}[part]
    return weight[rows.start : rows.stop : rows.step]


def expert_weight(model: nn.Module, name: str) -> Tensor:
    """The same by the name of the projection as a module (``expert_part``)."""
    place = inside(name)
    assert place is not None
    return projection(model.get_submodule(place.experts), place.expert, place.leaf)


def use_adapted_experts(model: PreTrainedModel) -> None:
    """Have transformers call what ``adapt`` has put at each module of experts."""
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = _call_adapted
    _use(model, IMPLEMENTATION)


@contextmanager
def transformers_experts(model: PreTrainedModel) -> Iterator[None]:
    """Have transformers compute experts itself for a while, as plainly as it can."""
    before = model.config._experts_implementation
    _use(model, "eager")
    try:
        yield
    finally:
        _use(model, before)


def _use(model: PreTrainedModel, implementation: str | None) -> None:
    model.config._experts_implementation = implementation
    model.config.get_text_config()._experts_implementation = implementation


def adapt(experts: nn.Module, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """``compute``: (x ``[T, hidden]``, experts ``[T, k]``, their weights ``[T, k]``) -> ``[T,
    hidden]``."""
    experts._loramux = compute  # type: ignore[assignment]


def activation_of(experts: nn.Module) -> str | None:
    """What the gate goes through, as ``ops.expert_kernels`` calls it; None for anything unusual."""
    interface: Any = experts
    if type(experts)._apply_gate is not _default_apply_gate:  # type: ignore[attr-defined]
        return None
    return _ACTIVATIONS.get(type(interface.act_fn))


def _call_adapted(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return module._loramux(x, index, weights)


def mixtures_of(model: PreTrainedModel, experts: Mapping[str, ExpertsShape]) -> set[Mixture]:
    """Kinds of layers with experts, by what their kernels hang on."""
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
    return {Mixture(shape.num_experts, top_k) for shape in experts.values()}
