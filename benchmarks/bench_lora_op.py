"""What does the LoRA op cost per layer of a Llama-3.1-8B shape on a GPU, and what does it hide?

Thirty-two layers of four fused sites with random adapters in one arena, as a CUDA graph, so that no
weights are found in a cache. ``alone``: only the op. ``in_place``, ``beside``: microseconds that
the op adds to a chain of the base's matrix products, after each product or next to it. ``floor``:
what its bytes and launches take at least.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.report import finish
from benchmarks.timing import graph_microseconds
from benchmarks.workloads import BASE, rows_of
from loramux.adapters.spec import ModuleShape
from loramux.lora.routing import Routing
from loramux.lora.segments import padded_rows
from loramux.lora.slots import SlotTables
from loramux.lora.weights import block_bytes, plain_placements
from loramux.ops.interface import Site, Slice
from loramux.ops.layout import ALIGN_BYTES, OFFSET_A, OFFSET_B, RANK, pad
from loramux.ops.tiles import FEW_ADAPTERS, TileChooser, Tiles
from loramux.ops.triton_lora import TritonOps
from loramux.ops.tuning import tile_chooser
from loramux.types import Slot

SITES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
DTYPE = torch.bfloat16
COPY_BYTES_PER_MICROSECOND = 4.27e6
"""Of a large copy on an H200."""
LAUNCH_MICROSECONDS = 1.25
"""From one small kernel to the next that depends on it, in a CUDA graph there."""


class Model:
    """The sites of all layers, their base weights and an arena full of adapters."""

    def __init__(self, num_layers: int, num_slots: int, rank: int, max_tokens: int) -> None:
        device = torch.device("cuda")
        shapes = [
            ModuleShape(inputs, size)
            for _ in range(num_layers)
            for inputs, sizes in SITES.values()
            for size in sizes
        ]
        self.tables = SlotTables(len(shapes), num_slots, device)
        self.routing = Routing(num_slots, max_tokens, device)
        placements = plain_placements(dict(enumerate(shapes)), rank, DTYPE)
        num_bytes = block_bytes(shapes, rank, DTYPE)
        for slot in range(num_slots):
            self.tables.set(Slot(slot), placements, slot * num_bytes // ALIGN_BYTES)
        self.tables.flush()
        num_elements = num_slots * num_bytes // DTYPE.itemsize
        self.arena = torch.randn(num_elements, device=device, dtype=DTYPE) * 0.02
        self.sites: list[tuple[str, Site, Tensor]] = []
        module = 0
        for _ in range(num_layers):
            for name, (inputs, sizes) in SITES.items():
                starts = list(itertools.accumulate(sizes, initial=0))
                slices = tuple(Slice(module + i, starts[i], size) for i, size in enumerate(sizes))
                module += len(sizes)
                weight = torch.randn(sum(sizes), inputs, device=device, dtype=DTYPE) * 0.01
                self.sites.append((name, Site(slices, inputs, None), weight))
        self.num_layers = num_layers


class Runner:
    """Runs all sites in the ways that are compared."""

    def __init__(self, model: Model, ops: TritonOps, num_rows: int) -> None:
        self.model, self.ops = model, ops
        self.side = torch.cuda.Stream()
        self.x = {
            inputs: torch.randn(num_rows, inputs, device="cuda", dtype=DTYPE)
            for inputs, _ in SITES.values()
        }
        self.y = {
            name: torch.empty(num_rows, sum(sizes), device="cuda", dtype=DTYPE)
            for name, (_, sizes) in SITES.items()
        }
        self.delta = {name: torch.empty_like(y) for name, y in self.y.items()}

    def alone(self) -> None:
        for name, site, _ in self.model.sites:
            self._add(self.y[name], self.x[site.in_features], site)

    def base(self) -> None:
        for name, site, weight in self.model.sites:
            torch.mm(self.x[site.in_features], weight.t(), out=self.y[name])

    def in_place(self) -> None:
        for name, site, weight in self.model.sites:
            x = self.x[site.in_features]
            torch.mm(x, weight.t(), out=self.y[name])
            self._add(self.y[name], x, site)

    def beside(self) -> None:
        """Without the consumer's addition, which a compiler puts into a kernel that is there."""
        main = torch.cuda.current_stream()
        for name, site, weight in self.model.sites:
            x = self.x[site.in_features]
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                self.ops.lora_delta_(
                    self.delta[name], x, site, self.model.arena, self.model.tables,
                    self.model.routing,
                )  # fmt: skip
            torch.mm(x, weight.t(), out=self.y[name])
            main.wait_stream(self.side)

    def _add(self, y: Tensor, x: Tensor, site: Site) -> None:
        model = self.model
        self.ops.lora_add_(y, x, site, model.arena, model.tables, model.routing)


def relative_error(model: Model, ops: TritonOps, slots: list[int]) -> float:
    """Of the op on every site of the first layer, against float32 products."""
    worst = 0.0
    unit = ALIGN_BYTES // DTYPE.itemsize
    for _, site, _ in model.sites[: len(SITES)]:
        x = torch.randn(len(slots), site.in_features, device="cuda", dtype=DTYPE)
        size = sum(part.size for part in site.slices)
        y = torch.randn(len(slots), size, device="cuda", dtype=DTYPE) * 0.01
        wanted = y.float()
        for part, slot in itertools.product(site.slices, set(slots) - {BASE}):
            record = model.tables.host[part.module, slot]
            rank = int(record[RANK])
            a, b = int(record[OFFSET_A]) * unit, int(record[OFFSET_B]) * unit
            a_full = model.arena[a : a + rank * pad(site.in_features)].view(rank, -1)
            b_full = model.arena[b : b + part.size * pad(rank)].view(part.size, -1)[:, :rank]
            rows = [i for i, s in enumerate(slots) if s == slot]
            columns = slice(part.start, part.start + part.size)
            wanted[rows, columns] += x[rows].float() @ a_full.float().t() @ b_full.float().t()
        before = y.clone()
        ops.lora_add_(y, x, site, model.arena, model.tables, model.routing)
        worst = max(worst, float((y.float() - wanted).norm() / wanted.norm()))
        base_rows = [i for i, s in enumerate(slots) if s == BASE]
        assert torch.equal(y[base_rows], before[base_rows]), "a base row changed"
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="NAME=N[,NAME=N]",
        help="fields of Tiles to measure 64 rows with, instead of the usual cases; may be repeated",
    )
    parser.add_argument("--prefill", type=int, default=8192, help="rows of a prefill; 0 for none")
    parser.add_argument("--tuning", metavar="FILE", help="as in loramux serve")
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    chooser = tile_chooser(torch.cuda.get_device_name(), arguments.tuning)
    results: dict[str, dict[str, float]] = {}
    for rank in arguments.ranks:
        model = Model(arguments.layers, arguments.slots, rank, max(8192, *arguments.rows))
        if arguments.change:
            for change in arguments.change:
                results |= try_tiles(model, rank, change, chooser)
        else:
            results |= usual_cases(model, rank, arguments.rows, arguments.prefill, chooser)
        del model
        torch.cuda.empty_cache()
    arguments_record = vars(arguments) | {"gpu": torch.cuda.get_device_name()}
    finish("lora_op", arguments_record, results, arguments.out)


def measure(
    model: Model,
    rank: int,
    rows: int,
    popularity: str,
    chooser: TileChooser,
    modes: tuple[str, ...] = ("alone", "in_place", "beside"),
) -> dict[str, float]:
    """Microseconds per layer of one case."""
    slots = rows_of(popularity, rows, model.tables.num_slots)
    base = model.tables.num_slots
    few = len({*slots} - {BASE}) <= FEW_ADAPTERS
    model.routing.fill([Slot(base if s == BASE else s) for s in slots], [1] * rows, few=few)
    ops = TritonOps(
        padded_rows=padded_rows(model.tables.num_slots, model.routing.max_tokens),
        max_rank=rank,
        device=torch.device("cuda"),
        chooser=chooser,
    )
    ops.begin_step(rank, few=few)
    error = relative_error(model, ops, slots)
    assert error < 1e-2, f"relative error {error}"
    runner = Runner(model, ops, rows)

    def per_layer(mode: str) -> float:
        return graph_microseconds([getattr(runner, mode)]) / model.num_layers

    result = {"error": error}
    floor = per_layer("base") if set(modes) - {"alone"} else 0.0
    for mode in modes:
        result[mode] = round(per_layer(mode) - (0.0 if mode == "alone" else floor), 1)
    result["base"] = round(floor, 1)
    result["floor"] = round(floor_microseconds(rank, rows, len({*slots} - {BASE})), 1)
    print(f"r{rank:<3} T{rows:<5} {popularity:10}", result, flush=True)
    return result


def floor_microseconds(rank: int, rows: int, num_adapters: int) -> float:
    """What a layer of the op takes at least: its bytes at the speed of a copy, and its launches.

    A and B of each adapter are read once, x once; y is read and written.
    """
    num_bytes = 0
    for inputs, sizes in SITES.values():
        weights = rank * (inputs * len(sizes) + sum(sizes)) * num_adapters
        num_bytes += (weights + rows * (inputs + 2 * sum(sizes))) * DTYPE.itemsize
    return num_bytes / COPY_BYTES_PER_MICROSECOND + 2 * LAUNCH_MICROSECONDS * len(SITES)


def usual_cases(
    model: Model, rank: int, all_rows: list[int], prefill: int, chooser: TileChooser
) -> dict[str, dict[str, float]]:
    """Decode steps of several sizes, and a prefill."""
    results = {}
    for rows, popularity in itertools.product(all_rows, ("identical", "distinct", "half", "base")):
        if rows > 1 or popularity == "identical":
            name = f"r{rank} T{rows} {popularity}"
            results[name] = measure(model, rank, rows, popularity, chooser)
    for popularity in ("identical", "runs") if prefill else ():
        name = f"r{rank} T{prefill} {popularity}"
        results[name] = measure(model, rank, prefill, popularity, chooser)
    return results


@dataclass(frozen=True)
class ChangedTiles:
    """Another chooser's tiles with some fields replaced."""

    chooser: TileChooser
    fields: Mapping[str, int]

    def choose(
        self, in_features: int, sizes: Sequence[int], rows: int, rank_bucket: int, few: bool
    ) -> Tiles:
        chosen = self.chooser.choose(in_features, sizes, rows, rank_bucket, few)
        return replace(chosen, **self.fields)

    def max_split_k(self, block_rows: int, rank_bucket: int) -> int:
        return self.fields.get("split_k") or self.chooser.max_split_k(block_rows, rank_bucket)


def try_tiles(
    model: Model, rank: int, change: str, chooser: TileChooser
) -> dict[str, dict[str, float]]:
    """A choice of tiles that differs from today's in some fields."""
    fields = {name: int(value) for name, value in (p.split("=") for p in change.split(","))}
    changed = ChangedTiles(chooser, fields)
    results = {}
    for popularity in ("identical", "distinct"):
        print(f"{change:40}", end=" ")
        try:
            results[f"r{rank} T64 {popularity} {change}"] = measure(
                model, rank, 64, popularity, changed, ("alone", "beside")
            )
        except OutOfResources as error:
            print(error)
    return results


if __name__ == "__main__":
    main()
