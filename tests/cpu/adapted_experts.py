"""One layer of experts with adapters in slots, from the real parts, and what it must compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from loramux.adapters.experts import DOWN, GATE, PARTS, UP, expert_modules, expert_part
from loramux.adapters.spec import ExpertsShape, LoraSpec, ModuleDelta, ModuleShape
from loramux.lora.device_store import DeviceStore
from loramux.lora.experts import AdaptedExperts, GroupedExperts
from loramux.lora.lanes import DirectLane
from loramux.lora.layers import Form, LoraContext
from loramux.lora.own import OwnParts
from loramux.lora.routing import Routing
from loramux.lora.segments import padded_rows
from loramux.lora.slots import SlotTables
from loramux.lora.transfers import Transfers
from loramux.lora.weights import HostCopy, ModuleTable, pack
from loramux.model.experts import projection
from loramux.ops.reference import ReferenceOps
from loramux.ops.triton_lora import TritonOps
from loramux.types import Slot

EXPERTS, TOP_K, HIDDEN, SIZE, RANK, TOKENS = 4, 2, 128, 256, 8, 16
SHAPE = ExpertsShape(EXPERTS, HIDDEN, SIZE)
MAX_TOKENS = 64
SCALE = 1.5
CPU = torch.device("cpu")
ATTENTION = "self_attn.q_proj"
"""A module that stands in the tables before the experts'."""


class Experts(Protocol):
    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x ``[T, hidden]``, index and weights ``[T, k]`` -> ``[T, hidden]``."""
        ...


Build = Callable[[nn.Module, int, LoraContext], Experts]
"""The module of all experts, the row of the slot tables where its first projection stands, and the
tables and routing that it reads."""


def in_torch(experts: nn.Module, first: int, context: LoraContext) -> Experts:
    return AdaptedExperts(experts, first, context)


def by_kernels(experts: nn.Module, first: int, context: LoraContext) -> Experts:
    tables, routing = context.tables, context.routing
    ops = TritonOps(
        padded_rows=padded_rows(tables.num_slots, MAX_TOKENS),
        max_rank=64,
        device=context.arena.device,
    )
    context = replace(context, ops=ops)
    grouped = GroupedExperts(experts, first, context, "silu")

    def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Sets the step up as the runner does."""
        slots = [segment.slot for segment in routing.segments]
        ops.begin_step(max((tables.max_rank[s] for s in slots), default=0), few=len(slots) <= 4)
        context.form.set(Form.BESIDE if slots else Form.NONE)
        return grouped(x, index, weights)

    return run


Pair = tuple[Tensor, Tensor]
"""A ``[rank, in]`` and B ``[out, rank]``."""
Place = tuple[int, str]
"""An expert and a projection of it."""


@dataclass(frozen=True)
class Adapter:
    """LoRA by place; those that have the same tensor object share it."""

    pairs: Mapping[Place, Pair]
    magnitudes: Mapping[Place, Tensor] = field(default_factory=dict)


def draw(
    seed: int,
    *,
    ranks: Callable[[int, str], int] = lambda expert, part: RANK,
    parts: Sequence[str] = PARTS,
    experts: Sequence[int] = range(EXPERTS),
) -> Adapter:
    """Random weights that move the result by about its own size."""
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[Place, Pair] = {}
    for expert in experts:
        for part in parts:
            into, out = (SIZE, HIDDEN) if part == DOWN else (HIDDEN, SIZE)
            rank = ranks(expert, part)
            a = torch.randn(rank, into, generator=generator) * into**-0.5
            pairs[expert, part] = a, torch.randn(out, rank, generator=generator) * rank**-0.5
    return Adapter(pairs)


class ExpertsLayer:
    """A layer with slots; adapters are packed and loaded as in a worker."""

    def __init__(
        self,
        build: Build,
        *,
        num_slots: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        on_gpu = build is by_kernels and torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        config: Any = Qwen3MoeConfig(
            num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=SIZE
        )
        self.device, self.dtype, self.num_slots = device, dtype, num_slots
        self.module = Qwen3MoeExperts(config).to(device, dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.data.copy_(drawn)
        shapes = {ATTENTION: ModuleShape(HIDDEN, HIDDEN)}
        shapes |= expert_modules({"experts": SHAPE})
        self._modules = ModuleTable(tuple(shapes), tuple(shapes.values()))
        transfers = Transfers(DirectLane(), DirectLane())
        self.store = DeviceStore(2**24, dtype, device, transfers)
        self.tables = SlotTables(len(shapes), num_slots, device)
        self.routing = Routing(num_slots, MAX_TOKENS, device)
        own = OwnParts(self.routing)
        context = LoraContext(ReferenceOps(), self.store.arena, self.tables, self.routing, own)
        self._experts = build(self.module, 1, context)
        self._copies: dict[int, HostCopy] = {}
        self._adapters: dict[int, Adapter] = {}

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in place of what is there."""
        if slot in self._copies:
            self.store.clear(Slot(slot))
        tensors: dict[str, Tensor] = {}
        deltas = [ModuleDelta(ATTENTION, 1, SCALE, "attention.a", "attention.b")]
        tensors["attention.a"], tensors["attention.b"] = (
            torch.ones(1, HIDDEN),
            torch.ones(HIDDEN, 1),
        )
        for (expert, part), (a, b) in adapter.pairs.items():
            module = expert_part("experts", expert, part)
            names = {f"{id(tensor)}": tensor for tensor in (a, b)}
            magnitude = adapter.magnitudes.get((expert, part))
            if magnitude is not None:
                names[f"{module}.m"] = magnitude
            tensors |= names
            deltas.append(ModuleDelta(module, len(a), SCALE, *names))
        copy = pack(LoraSpec(tuple(deltas)), tensors, self._modules, self.dtype, self._base_weight)
        self._copies[slot], self._adapters[slot] = copy, adapter
        for moved in (Slot(slot), *self.store.load(Slot(slot), copy.block)):
            start = self.store.start_of(moved) // self.store.unit
            self.tables.set(moved, self._copies[moved].placements, start)
        self.tables.flush()

    def block_bytes(self, slot: int) -> int:
        return self._copies[slot].num_bytes

    def _base_weight(self, module: int) -> Tensor:
        expert, part = divmod(module - 1, len(PARTS))
        return projection(self.module, expert, PARTS[part]).cpu()

    def run(self, slots: Sequence[int], rows: Rows) -> Tensor:
        """``[T, hidden]`` of rows whose adapters are in these slots; ``num_slots`` is the base."""
        self.routing.fill([Slot(slot) for slot in slots], [1] * len(slots), few=False)
        with torch.inference_mode():
            return self._experts(rows.x, rows.index, rows.weights)

    def expected(self, slots: Sequence[int], rows: Rows) -> Tensor:
        """The same by the formula, row by row in float64."""
        result = torch.zeros(len(slots), HIDDEN, dtype=torch.float64)
        for row, slot in enumerate(slots):
            x = rows.x[row].cpu().double()
            for choice in range(rows.index.shape[1]):
                expert = int(rows.index[row, choice])
                gate = self._project(slot, (expert, GATE), x)
                hidden = F.silu(gate) * self._project(slot, (expert, UP), x)
                down = self._project(slot, (expert, DOWN), hidden)
                result[row] += rows.weights[row, choice].cpu().double() * down
        return result

    def _project(self, slot: int, place: Place, x: Tensor) -> Tensor:
        expert, part = place
        weight = projection(self.module, expert, part).cpu().double()
        adapter = self._adapters.get(slot)
        pair = None if adapter is None else adapter.pairs.get(place)
        if adapter is None or pair is None:
            return weight @ x
        a, b = (tensor.double() for tensor in pair)
        weight = weight + SCALE * b @ a
        magnitude = adapter.magnitudes.get(place)
        gain = 1.0 if magnitude is None else magnitude.double() / weight.norm(dim=1)
        return gain * (weight @ x)


@dataclass(frozen=True)
class Rows:
    """The input of a layer: tokens, the experts chosen for each, and their weights."""

    x: Tensor
    index: Tensor
    weights: Tensor

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.x[rows], self.index[rows], self.weights[rows])


def draw_rows(layer: ExpertsLayer, num_tokens: int = TOKENS, seed: int = 1) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    scores = torch.randn(num_tokens, EXPERTS, generator=generator).softmax(-1)
    weights, index = scores.topk(TOP_K)
    return Rows(
        x.to(layer.device, layer.dtype),
        index.to(layer.device),
        weights.to(layer.device, layer.dtype),
    )
