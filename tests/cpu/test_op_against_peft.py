"""One linear with one adapter: packing and op together give what PEFT's own layer gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from loramux.adapters.spec import LoraSpec, ModuleDelta
from loramux.lora.layers import LoraContext, LoraLinear
from loramux.lora.own import OwnParts
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.weights import ModuleTable, pack
from loramux.model.anatomy import linear_shape, linear_weight
from loramux.ops.interface import LoraOps, Site, Slice
from loramux.ops.reference import ReferenceOps
from loramux.ops.stacked import StackedOps
from loramux.types import Slot
from tests.cpu.adapted_linear import CPU

IN, OUT, RANK, ALPHA = 53, 41, 6, 9


def make_block(linear: nn.Module) -> nn.ModuleDict:
    torch.manual_seed(3)
    for parameter in linear.parameters():
        parameter.data.normal_(0.0, 0.2)
    return nn.ModuleDict({"linear": linear}).requires_grad_(False)


def adapt(block: nn.ModuleDict, **change: Any) -> dict[str, Tensor]:
    """Wrap the block's linear by PEFT in place and give the adapter's tensors."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["linear"], **change)
    get_peft_model(block, config)  # type: ignore[arg-type]
    layer: Any = block["linear"]
    generator = torch.Generator().manual_seed(4)
    tensors = {"a": layer.lora_A["default"].weight.data, "b": layer.lora_B["default"].weight.data}
    if change.get("use_dora"):
        tensors["m"] = layer.lora_magnitude_vector["default"].weight.data
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return tensors


def serve(
    block: nn.ModuleDict, tensors: dict[str, Tensor], scale: float, ops: LoraOps, x: Tensor
) -> Tensor:
    """The block's output for x when its rows are the adapter's, through our own layer."""
    shape = linear_shape(block["linear"])
    assert shape is not None
    modules = ModuleTable(("linear",), (shape,))
    spec = LoraSpec(
        (ModuleDelta("linear", RANK, scale, "a", "b", "m" if "m" in tensors else None),)
    )
    weight = linear_weight(block["linear"])
    copy = pack(spec, tensors, modules, torch.float32, lambda _: weight)
    tables = SlotTables(1, 2, CPU)
    tables.set(Slot(0), copy.placements, 0)
    tables.set(Slot(1), copy.placements, 0)
    routing = Routing(2, 8, CPU)
    routing.fill([Slot(0), Slot(1), Slot(2)], [2, 2, 1])
    site = Site((Slice(0, 0, OUT),), IN, getattr(block["linear"], "bias", None))
    context = LoraContext(ops, copy.block.whole, tables, routing, OwnParts(routing))
    return LoraLinear(block["linear"], site, context, place=0)(x)


@pytest.mark.parametrize("make_ops", [ReferenceOps, StackedOps])
@pytest.mark.parametrize(
    ("change", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"use_dora": True}, ALPHA / RANK),
    ],
    ids=["lora", "rslora", "dora"],
)
@pytest.mark.parametrize(
    "make_linear",
    [lambda: nn.Linear(IN, OUT), lambda: nn.Linear(IN, OUT, bias=False), lambda: Conv1D(OUT, IN)],
    ids=["linear with bias", "linear", "transposed"],
)
def test_output_is_that_of_peft(
    make_linear: Any, change: dict[str, Any], scale: float, make_ops: type[LoraOps]
) -> None:
    linear = make_linear()
    x = torch.randn(1, 5, IN, generator=torch.Generator().manual_seed(5))
    plain = make_block(linear)["linear"](x)
    theirs = make_block(linear)
    transposed = isinstance(linear, Conv1D)
    tensors = adapt(theirs, fan_in_fan_out=transposed, **change)
    with torch.no_grad():
        wanted = theirs["linear"](x)

    got = serve(make_block(linear), tensors, scale, make_ops(), x)

    assert (wanted - plain).abs().max() > 0.3, "the adapter is too weak to show"
    torch.testing.assert_close(got[:, :4], wanted[:, :4], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[:, 4:], plain[:, 4:]), "the base's row has changed"
