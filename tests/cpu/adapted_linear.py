"""One linear with adapters in slots, put together from the real parts, and what it must compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loramux.adapters.spec import LoraSpec, ModuleDelta, ModuleShape
from loramux.lora.device_store import DeviceStore
from loramux.lora.lanes import DirectLane
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.transfers import Transfers
from loramux.lora.weights import HostCopy, ModuleTable, dora_gain, pack
from loramux.ops.interface import LoraOps, Site, Slice
from loramux.types import Slot

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """What one adapter does to one module, in the dtype of the arena."""

    a: Tensor
    b: Tensor
    gain: Tensor | None


@dataclass(eq=False)
class AdaptedLinear:
    """A linear of several modules side by side (one slice each) and its slots.

    ``parts[slot][module]`` is what the slot's adapter does, None where it does nothing.
    """

    in_features: int
    out_features: tuple[int, ...]
    num_slots: int
    dtype: torch.dtype = torch.float32
    bias: Tensor | None = None
    max_tokens: int = 64
    arena_bytes: int = 2**23
    device: torch.device = CPU
    parts: dict[Slot, list[Part | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(len(self.out_features) + self.in_features)
        shapes = tuple(ModuleShape(self.in_features, out) for out in self.out_features)
        self.modules = ModuleTable(tuple(f"m{i}" for i in range(len(shapes))), shapes)
        self.weight = [self.normal(out, self.in_features) for out in self.out_features]
        starts = [sum(self.out_features[:i]) for i in range(len(shapes))]
        slices = tuple(
            Slice(i, start, out)
            for i, (start, out) in enumerate(zip(starts, self.out_features, strict=True))
        )
        bias = None if self.bias is None else self.bias.to(self.device)
        self.site = Site(slices, self.in_features, bias)
        transfers = Transfers(DirectLane(), DirectLane())
        self.store = DeviceStore(self.arena_bytes, self.dtype, self.device, transfers)
        self.tables = SlotTables(len(shapes), self.num_slots, self.device)
        self.routing = Routing(self.num_slots, self.max_tokens, self.device)
        self._copies: dict[Slot, HostCopy] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5

    def load(
        self, slot: Slot, ranks: Sequence[int], *, dora: bool = False, poison: str = ""
    ) -> None:
        """Put a random adapter into a slot; ``poison`` names the matrix (a or b) that holds NaN."""
        deltas, tensors, parts = [], {}, list[Part | None]()
        for module, rank in enumerate(ranks):
            if rank == 0:
                parts.append(None)
                continue
            a, b = self.normal(rank, self.in_features), self.normal(self.out_features[module], rank)
            if poison:
                {"a": a, "b": b}[poison][0, 0] = torch.nan
            magnitude = 0.5 + torch.rand(self.out_features[module], generator=self.generator)
            name = f"m{module}"
            tensors |= {f"{name}.a": a, f"{name}.b": b, f"{name}.m": magnitude}
            delta = ModuleDelta(name, rank, 1.5, f"{name}.a", f"{name}.b")
            gain = None
            if dora:
                delta = ModuleDelta(name, rank, 1.5, f"{name}.a", f"{name}.b", f"{name}.m")
                gain = dora_gain(self.weight[module], a, b * 1.5, magnitude).to(self.dtype)
            deltas.append(delta)
            parts.append(Part(a.to(self.dtype), (b * 1.5).to(self.dtype), gain))
        spec = LoraSpec(tuple(deltas))
        copy = pack(spec, tensors, self.modules, self.dtype, lambda module: self.weight[module])
        self.parts[slot] = parts
        self._place(slot, copy)

    def clear(self, slot: Slot) -> None:
        del self.parts[slot], self._copies[slot]
        self.store.clear(slot)
        self.tables.clear(slot)

    def _place(self, slot: Slot, copy: HostCopy) -> None:
        moved = self.store.load(slot, copy.block)
        self._copies[slot] = copy
        for s in (slot, *moved):
            start = self.store.start_of(s) // self.store.unit
            self.tables.set(s, self._copies[s].placements, start)
        self.tables.flush()

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Random x ``[rows, in]`` and y ``[rows, out]``; y has zeros of both signs."""
        x = self.normal(num_rows, self.in_features) * self.in_features**0.5
        y = self.normal(num_rows, sum(self.out_features)) * sum(self.out_features) ** 0.5
        y[:, 0], y[:, -1] = 0.0, -0.0
        return x.to(self.device, self.dtype), y.to(self.device, self.dtype)

    def run(
        self, ops: LoraOps, slots: Sequence[Slot], x: Tensor, y: Tensor, *, few: bool = False
    ) -> Tensor:
        """What an op makes of y, which stays as it is."""
        self.routing.fill(slots, [1] * len(slots), few=few)
        result = y.clone()
        ops.lora_add_(result, x, self.site, self.store.arena, self.tables, self.routing)
        return result

    def expected(self, slots: Sequence[Slot], x: Tensor, y: Tensor) -> Tensor:
        """The same by the formula, row by row in float64."""
        x, result = x.cpu(), y.double().cpu()
        for row, slot in enumerate(slots):
            if slot == self.num_slots:
                continue
            for part, piece in zip(self.parts[slot], self.site.slices, strict=True):
                if part is None:
                    continue
                columns = slice(piece.start, piece.start + piece.size)
                bias = torch.zeros(piece.size) if self.bias is None else self.bias[columns]
                gain = torch.ones(piece.size) if part.gain is None else part.gain
                delta = part.b.double() @ (part.a.double() @ x[row].double())
                plain = result[row, columns] - bias.double()
                result[row, columns] = gain.double() * (plain + delta) + bias.double()
        return result


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest value: float32 sums in another order; bfloat16 rounds A x, the sum and y."""


def load_slots(linear: AdaptedLinear, ranks: Sequence[int], *, dora: bool = False) -> AdaptedLinear:
    """Fill every slot; every second adapter leaves one module out when there are several."""
    for slot in range(linear.num_slots):
        mine = list(ranks[: len(linear.out_features)])
        if len(mine) > 1 and slot % 2:
            mine[slot // 2 % len(mine)] = 0
        linear.load(Slot(slot), mine, dora=dora)
    return linear


def assert_close(got: Tensor, wanted: Tensor) -> None:
    worst = (got.double().cpu() - wanted.cpu()).abs().max()
    assert worst <= TOLERANCE[got.dtype] * wanted.abs().max(), f"off by {worst:.2e}"


def bits(x: Tensor) -> Tensor:
    """The values as integers, which tell zeros of both signs apart."""
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()])
