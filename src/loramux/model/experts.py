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
    PARTS,
    UP,
    expert_part,
    split_part,
)
from loramux.adapters.spec import ExpertsShape, ModuleShape

IMPLEMENTATION = "loramux"

_ACTIVATIONS: dict[type, str] = {
    nn.SiLU: "silu",
    SiLUActivation: "silu",
    GELUActivation: "gelu",
    GELUTanh: "gelu_tanh",
}


def find_experts(model: PreTrainedModel, *, any_gate: bool) -> dict[str, ExpertsShape]:
    """Modules with the experts of a layer, of the one kind that can take LoRA: gated, without
    biases, gate before up, each weight ``[out, in]``.

    ``any_gate``: whatever joins gate and up will do, as in plain torch; else only what the kernels
    know.
    """
    found: dict[str, ExpertsShape] = {}
    for name, module in model.named_modules():
        gate_up = getattr(module, GATE_UP_PARAMETER, None)
        down = getattr(module, DOWN_PARAMETER, None)
        if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)):
            continue
        interface: Any = module
        usual = (
            getattr(interface, "has_gate", False)
            and getattr(interface, "is_concatenated", False)
            and not getattr(interface, "is_transposed", True)
            and not getattr(interface, "has_bias", True)
            and not getattr(interface, "has_post_expert_norm", False)
        )
        known = any_gate or (usual and activation_of(module) is not None)
        if usual and known and gate_up.dim() == 3:
            num_experts, hidden, intermediate = down.shape
            found[name] = ExpertsShape(num_experts, hidden, intermediate)
    return found


def find_routers(
    model: PreTrainedModel, experts: Mapping[str, ExpertsShape]
) -> dict[str, ModuleShape]:
    """Modules beside experts with nothing but a weight for each of these; linears are none."""
    found: dict[str, ModuleShape] = {}
    for name, shape in experts.items():
        parent = name.rpartition(".")[0]
        for leaf, module in model.get_submodule(parent).named_children():
            parameters = dict(module.named_parameters())
            weight = parameters.get("weight")
            if (
                not isinstance(module, nn.Linear)
                and parameters.keys() == {"weight"}
                and weight is not None
                and tuple(weight.shape) == (shape.num_experts, shape.hidden)
            ):
                found[f"{parent}.{leaf}"] = ModuleShape(shape.hidden, shape.num_experts)
    return found


def expert_modules(experts: Mapping[str, ExpertsShape]) -> Iterator[tuple[str, ModuleShape]]:
    """Every projection of every expert as a module of its own: for each expert ``PARTS``."""
    for name, shape in experts.items():
        into = ModuleShape(shape.hidden, shape.intermediate)
        out = ModuleShape(shape.intermediate, shape.hidden)
        shapes = {GATE: into, UP: into, DOWN: out}
        for expert in range(shape.num_experts):
            for part in PARTS:
                yield expert_part(name, expert, part), shapes[part]


def expert_weight(model: nn.Module, name: str) -> Tensor:
    """The weight ``[out, in]`` of a projection of an expert (``expert_part``): a view of that of
    all."""
    holder, expert, part = split_part(name)
    experts = model.get_submodule(holder)
    if part == DOWN:
        return cast(Tensor, getattr(experts, DOWN_PARAMETER))[expert]
    both = cast(Tensor, getattr(experts, GATE_UP_PARAMETER))[expert]
    half = both.shape[0] // 2
    return both[:half] if part == GATE else both[half:]


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
