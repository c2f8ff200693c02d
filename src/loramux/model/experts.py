"""The experts of a mixture, as transformers' experts interface has them, and their routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from loramux.adapters.experts import (
    DOWN,
    DOWN_PARAMETER,
    GATE,
    GATE_UP_PARAMETER,
    PARTS,
    expert_part,
)
from loramux.adapters.spec import ExpertsShape, ModuleShape

IMPLEMENTATION = "loramux"


def find_experts(model: PreTrainedModel) -> dict[str, ExpertsShape]:
    """Modules with the experts of a layer, of the one kind that can take LoRA: gated, without
    biases, gate before up, each weight ``[out, in]``."""
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
            and not getattr(interface, "has_post_expert_norm", True)
        )
        if usual and gate_up.dim() == 3:
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


class ExpertWeight(nn.Module):
    """One projection of one expert, as if it were a linear: a view of the weight of all."""

    def __init__(self, experts: nn.Module, expert: int, part: str) -> None:
        super().__init__()
        self._experts = (experts,)  # not a child: it is in the model already
        self._expert = expert
        self._part = part

    @property
    def weight(self) -> Tensor:
        """``[out, in]``"""
        [experts] = self._experts
        if self._part == DOWN:
            return cast(Tensor, getattr(experts, DOWN_PARAMETER))[self._expert]
        both = cast(Tensor, getattr(experts, GATE_UP_PARAMETER))[self._expert]
        half = both.shape[0] // 2
        return both[:half] if self._part == GATE else both[half:]


def expert_weights(
    model: nn.Module, experts: Mapping[str, ExpertsShape]
) -> dict[str, ExpertWeight]:
    """Every projection of every expert by its name as a module."""
    return {
        expert_part(name, expert, part): ExpertWeight(model.get_submodule(name), expert, part)
        for name, shape in experts.items()
        for expert in range(shape.num_experts)
        for part in PARTS
    }


def use_adapted_experts(model: PreTrainedModel) -> None:
    """Have transformers call what ``adapt`` has put at each module of experts."""
    ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION] = _call_adapted
    model.config._experts_implementation = IMPLEMENTATION
    model.config.get_text_config()._experts_implementation = IMPLEMENTATION


def adapt(experts: nn.Module, compute: object) -> None:
    """``compute``: (x ``[T, hidden]``, experts ``[T, k]``, their weights ``[T, k]``) -> ``[T,
    hidden]``."""
    object.__setattr__(experts, "_loramux", compute)


def _call_adapted(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return module._loramux(x, index, weights)
