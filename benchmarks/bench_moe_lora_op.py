"""What does LoRA on all experts cost per layer of a Qwen3-30B-A3B shape on a GPU?

Some layers of experts with random weights, routers that choose at random, and adapters on every
expert in one arena, as a CUDA graph: between two uses of a weight lie gigabytes, so none is found
in a cache. ``base``: microseconds of a layer's experts without adapters. Others: what each mix of
adapters takes; ``share`` is base over it. ``floor``: what the bytes take at least, of experts and
of adapters that some row has chosen. ``kernels``: microseconds of each kernel, of which shrinks run
beside products. ``grouped_mm``: what torch's grouped product takes for the same two products, once
the rows are sorted.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm
from triton.runtime.errors import OutOfResources

from benchmarks.bench_lora_op import COPY_BYTES_PER_MICROSECOND, DTYPE
from benchmarks.report import finish
from benchmarks.timing import graph_microseconds
from benchmarks.workloads import BASE, rows_of
from loramux.adapters.spec import ModuleShape
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.weights import block_bytes, plain_placements
from loramux.ops import expert_tiles, triton_experts
from loramux.ops.expert_tiles import ProductTiles
from loramux.ops.layout import ALIGN_BYTES, EXPERT_PARTS, OFFSET_A, OFFSET_B, RANK
from loramux.ops.lora_launches import StepLaunches
from loramux.ops.tiles import FEW_ADAPTERS
from loramux.ops.triton_experts import TritonExperts
from loramux.types import Slot

MAX_ERROR = 1e-2


class Layers:
    """Experts of some layers, who is chosen in each, and an arena with adapters on all experts."""

    def __init__(
        self, device: torch.device, sizes: argparse.Namespace, num_slots: int, max_tokens: int
    ) -> None:
        experts, hidden, size = sizes.experts, sizes.hidden, sizes.size
        self.top_k = sizes.top_k
        into, out = ModuleShape(hidden, size), ModuleShape(size, hidden)
        shapes = [into, into, out] * experts * sizes.layers
        assert len(shapes) == EXPERT_PARTS * experts * sizes.layers
        self.tables = SlotTables(len(shapes), num_slots, device)
        placements = plain_placements(dict(enumerate(shapes)), sizes.rank, DTYPE)
        num_bytes = block_bytes(shapes, sizes.rank, DTYPE)
        for slot in range(num_slots):
            self.tables.set(Slot(slot), placements, slot * num_bytes // ALIGN_BYTES)
        self.tables.flush()
        self.arena = _random(num_slots * num_bytes // DTYPE.itemsize, scale=0.02, device=device)
        self.routing = Routing(num_slots, max_tokens, device)
        self.gate_up = [
            _random(experts, 2 * size, hidden, scale=hidden**-0.5, device=device)
            for _ in range(sizes.layers)
        ]
        self.down = [
            _random(experts, hidden, size, scale=size**-0.5, device=device)
            for _ in range(sizes.layers)
        ]

    def chosen(self, num_tokens: int) -> tuple[list[Tensor], Tensor]:
        """A router's choice for each layer, and weights."""
        device, experts = self.arena.device, len(self.down[0])
        scores = [torch.rand(num_tokens, experts, device=device) for _ in self.down]
        weights = torch.full((num_tokens, self.top_k), 1 / self.top_k, device=device)
        return [score.topk(self.top_k).indices for score in scores], weights

    def table(self, layer: int) -> Tensor:
        rows = EXPERT_PARTS * len(self.down[0])
        return self.tables.table[layer * rows : (layer + 1) * rows]


def _random(*shape: int, scale: float, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=DTYPE) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=768, help="of an expert's inner vectors")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 4096])
    parser.add_argument(
        "--product",
        action="append",
        default=[],
        metavar="NAME=N[,NAME=N]",
        help="fields of ProductTiles to measure the base with, instead of the usual cases; may be "
        "repeated",
    )
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    layers = Layers(device, arguments, max(arguments.adapters), max(arguments.rows))
    results: dict[str, dict[str, Any]] = {}
    for rows, change in itertools.product(arguments.rows, arguments.product):
        results[f"T{rows} base {change}"] = try_tiles(layers, rows, change, arguments.rank)
        print(f"T{rows} base {change}", results[f"T{rows} base {change}"], flush=True)
    for rows in () if arguments.product else arguments.rows:
        base = measure(layers, rows, 0, arguments.rank)
        base["grouped_mm"] = grouped_mm_microseconds(layers, rows)
        results[f"T{rows} base"] = base
        for adapters in arguments.adapters:
            if adapters > rows:
                continue
            found = measure(layers, rows, adapters, arguments.rank)
            found["share"] = round(base["us"] / found["us"], 3)
            results[f"T{rows} adapters {adapters}"] = found
            print(f"T{rows} adapters {adapters}", base, found, flush=True)
    record = vars(arguments) | {"gpu": torch.cuda.get_device_name()}
    finish("moe_lora_op", record, results, arguments.out)


def try_tiles(layers: Layers, rows: int, change: str, rank: int) -> dict[str, Any]:
    """The base with other tiles of its products."""
    fields = {name: int(value) for name, value in (p.split("=") for p in change.split(","))}
    usual = expert_tiles.product_tiles

    def changed(num_pairs: int, num_experts: int, element_size: int) -> ProductTiles:
        return replace(usual(num_pairs, num_experts, element_size), **fields)

    triton_experts.product_tiles = changed
    try:
        return measure(layers, rows, 0, rank)
    except OutOfResources as error:
        return {"error": str(error)}
    finally:
        triton_experts.product_tiles = usual


def measure(layers: Layers, rows: int, adapters: int, rank: int) -> dict[str, Any]:
    """Microseconds per layer of one case."""
    indices, weights = layers.chosen(rows)
    slots = rows_of("distinct" if adapters else "base", rows, adapters)
    experts = begin(layers, slots, rank)
    x = _random(rows, layers.gate_up[0].shape[2], scale=1.0, device=layers.arena.device)

    def run_all() -> None:
        for layer, index in enumerate(indices):
            run(layers, experts, x, layer, index, weights, lora=adapters > 0)

    error = relative_error(layers, experts, slots, x, indices[0], weights)
    assert error < MAX_ERROR, f"relative error {error}"
    floors = [floor_microseconds(layers, slots, index, rank) for index in indices]
    return {
        "us": round(graph_microseconds([run_all]) / len(indices), 1),
        "floor": round(sum(floors) / len(floors), 1),
        "error": error,
        "kernels": kernel_microseconds(run_all, len(indices)),
    }


def grouped_mm_microseconds(layers: Layers, rows: int) -> float:
    """Of both products of a layer, by torch."""
    indices, _ = layers.chosen(rows)
    experts, hidden, size = layers.down[0].shape
    x = _random(rows * layers.top_k, hidden, scale=1.0, device=layers.arena.device)
    inner = _random(rows * layers.top_k, size, scale=1.0, device=layers.arena.device)
    ends = [
        torch.bincount(index.reshape(-1), minlength=experts).cumsum(0).int() for index in indices
    ]

    def run_all() -> None:
        for gate_up, down, end in zip(layers.gate_up, layers.down, ends, strict=True):
            grouped_mm(x, gate_up.transpose(1, 2), offs=end)
            grouped_mm(inner, down.transpose(1, 2), offs=end)

    return round(graph_microseconds([run_all]) / len(indices), 1)


def kernel_microseconds(run_all: Callable[[], None], num_layers: int) -> dict[str, float]:
    """Of each kernel in a layer, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_all()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:40]] += event.device_time_total
    return {name: round(us / num_layers, 1) for name, us in found.most_common()}


def begin(layers: Layers, slots: Sequence[int], rank: int) -> TritonExperts:
    """Set a step up in which each row has the adapter of its slot."""
    few = len({*slots} - {BASE}) <= FEW_ADAPTERS
    base = layers.tables.num_slots
    layers.routing.fill([Slot(base if s == BASE else s) for s in slots], [1] * len(slots), few=few)
    step = StepLaunches(layers.arena.device, rank)
    step.begin_step(rank, few=few)
    return TritonExperts(step)


def run(
    layers: Layers, experts: TritonExperts, x: Tensor, layer: int, index: Tensor, weights: Tensor,
    *, lora: bool,
) -> Tensor:  # fmt: skip
    return experts.run_experts(
        x, index, weights, layers.gate_up[layer], layers.down[layer], layers.arena,
        layers.table(layer), layers.routing.token_slot, layers.routing.token_count, "silu",
        lora=lora,
    )  # fmt: skip


def relative_error(
    layers: Layers, experts: TritonExperts, slots: Sequence[int], x: Tensor, index: Tensor,
    weights: Tensor, most: int = 16,
) -> float:  # fmt: skip
    """Of the first layer, against float32 products of some rows."""
    lora = any(slot != BASE for slot in slots)
    got = run(layers, experts, x, 0, index, weights, lora=lora)[:most].float()
    wanted = torch.zeros_like(got)
    for row, choice in itertools.product(range(len(got)), range(layers.top_k)):
        expert, slot = int(index[row, choice]), slots[row]
        gate_up = layers.gate_up[0][expert].float() @ x[row].float()
        if slot != BASE:
            gate, up = (_delta(layers, expert, part, slot, x[row].float()) for part in (0, 1))
            gate_up += torch.cat([gate, up])
        gate, up = gate_up.chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        out = layers.down[0][expert].float() @ inner
        if slot != BASE:
            out += _delta(layers, expert, 2, slot, inner)
        wanted[row] += weights[row, choice] * out
    return round(float((got - wanted).norm() / wanted.norm()), 5)


def _delta(layers: Layers, expert: int, part: int, slot: int, x: Tensor) -> Tensor:
    """B (A x) of one projection of an expert of the first layer."""
    record = layers.tables.host[EXPERT_PARTS * expert + part, slot]
    unit, rank = ALIGN_BYTES // DTYPE.itemsize, int(record[RANK])
    out = layers.down[0].shape[2 if part < 2 else 1]
    a, b = int(record[OFFSET_A]) * unit, int(record[OFFSET_B]) * unit
    down = layers.arena[a : a + rank * len(x)].view(rank, -1).float() @ x
    return layers.arena[b : b + out * rank].view(out, -1)[:, :rank].float() @ down


def floor_microseconds(layers: Layers, slots: Sequence[int], index: Tensor, rank: int) -> float:
    """What a layer takes at least: each weight that is needed, once, at the speed of a copy."""
    hidden, size = layers.down[0].shape[1:]
    pairs = [(expert, slots[row]) for row, chosen in enumerate(index.tolist()) for expert in chosen]
    num_experts = len({expert for expert, _ in pairs})
    num_deltas = len({pair for pair in pairs if pair[1] != BASE})
    elements = 3 * hidden * size * num_experts + 3 * rank * (hidden + size) * num_deltas
    return elements * DTYPE.itemsize / COPY_BYTES_PER_MICROSECOND


if __name__ == "__main__":
    main()
