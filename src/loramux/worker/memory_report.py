"""The block of the log that tells at start where the memory has gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.worker.arena import KnownAdapter


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """What a GPU holds beside weights, adapters and KV cache, in bytes."""

    lora_workspace: int
    step: int
    """What the largest step takes on top and gives back."""
    max_step_tokens: int
    num_graphs: int
    graphs: int
    in_use: int
    """Between steps, by other processes as well."""
    total: int


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Where a server's memory has gone, in bytes."""

    weights: int
    kv_cache: int
    num_blocks: int
    block_size: int
    arena: int
    num_slots: int
    adapters: Mapping[int, int]
    """By rank, what an adapter on every linear takes."""
    with_experts: Mapping[int, int] = field(default_factory=dict)
    """The same on every expert as well; empty where the base has none that take LoRA."""
    largest: KnownAdapter | None = None
    """Of those that are to be served from the start on."""
    gpu: GpuMemory | None = None

    def lines(self) -> list[str]:
        """A table, one line for each part."""
        tokens = self.num_blocks * self.block_size
        fitting = self._fitting(self.adapters)
        if self.with_experts:
            fitting += f"; with experts {self._fitting(self.with_experts)}"
        if self.largest is not None:
            fitting += f"; {self.arena // self.largest.num_bytes:,} like {self.largest.name!r}"
        rows = [
            ("weights", self.weights, ""),
            ("KV cache", self.kv_cache, f"{self.num_blocks:,} blocks, {tokens:,} tokens"),
            ("adapters", self.arena, f"{self.num_slots} slots; room for {fitting}"),
        ]
        gpu = self.gpu
        if gpu is not None:
            peak = gpu.in_use + gpu.step
            rows += [
                ("LoRA workspace", gpu.lora_workspace, ""),
                ("graphs", gpu.graphs, f"{gpu.num_graphs} captured"),
                ("activations", gpu.step, f"largest step, {gpu.max_step_tokens:,} tokens"),
                ("in use between steps", gpu.in_use, "by other processes as well"),
                ("in use at the peak", peak, f"of {_size(gpu.total).strip()}"),
                ("free at the peak", max(gpu.total - peak, 0), ""),
            ]
        return [f"  {name:<21}{_size(size)}  {note}".rstrip() for name, size, note in rows]

    def _fitting(self, adapters: Mapping[int, int]) -> str:
        counts = (f"{self.arena // size:,} of rank {rank}" for rank, size in adapters.items())
        return ", ".join(counts)


def _size(num_bytes: int) -> str:
    """``" 16.06 GB"``, in a column."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:>9,.2f} {unit}"
    return f"{num_bytes / 1000:>9,.2f} kB"
