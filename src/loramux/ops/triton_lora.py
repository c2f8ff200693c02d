"""The LoRA op on CUDA: launches of the Triton kernels, and the workspace between them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.ops.expert_tiles import Mixture
from loramux.ops.interface import Routing, Site, SlotTables
from loramux.ops.lora_launches import (
    Launch,
    Pieces,
    StepLaunches,
    launch_expand,
    launch_shrink,
    plane_elements,
    run_kernel,
)
from loramux.ops.opaque import register_lora
from loramux.ops.tiles import MAX_SLICES, DefaultTiles, TileChooser, block_rows_of, launches_of
from loramux.ops.triton_experts import TritonExperts
from loramux.ops.tuning import ROW_BUCKETS, bucket_of


class TritonOps:
    """Implements ``ops.interface.LoraOps`` with two launches for each site of up to three slices.

    Grids depend on the step's bucket and on whether its adapters are few, and nothing is allocated,
    so launches can be captured in a CUDA graph and replayed for other adapters, few or many as the
    captured ones, of the same rank bucket.
    """

    name = "triton"

    def __init__(
        self,
        *,
        padded_rows: Mapping[int, int],
        max_rank: int,
        device: torch.device,
        chooser: TileChooser | None = None,
        launch: Launch = run_kernel,
    ) -> None:
        """``padded_rows``: for each length of segments, the most rows that those of a step have
        together when each counts as full. Ranks are at most ``max_rank``.
        """
        self._chooser = chooser or DefaultTiles()
        self._step = StepLaunches(device, max_rank, launch)
        self._bound: tuple[Tensor, Routing] | None = None
        self._experts = TritonExperts(self._step)
        self.experts = self._experts.number
        self.number = register_lora(self)
        size = max(
            self._chooser.max_split_k(block_rows, bucket) * MAX_SLICES * rows * bucket
            for block_rows, rows in padded_rows.items()
            for bucket in self._step.rank_buckets
        )
        self._planes = torch.empty(size, dtype=torch.float32, device=device)

    @property
    def workspace_bytes(self) -> int:
        return self._planes.nbytes

    def bind(self, arena: Tensor, routing: Routing) -> None:
        """What the ops inside compiled layers read beside their arguments."""
        self._bound = (arena, routing)

    @property
    def rank_buckets(self) -> tuple[int, ...]:
        """Largest ranks that launches can be made for."""
        return self._step.rank_buckets

    def begin_step(self, max_rank: int, *, few: bool) -> None:
        self._step.begin_step(max_rank, few=few)

    def bucket_of(self, max_rank: int) -> int:
        """The smallest rank bucket that holds a rank."""
        return self._step.bucket_of(max_rank)

    def compiling(self) -> AbstractContextManager[None]:
        """What is launched inside does not run: its kernels are compiled, many at a time."""
        return self._step.compiling()

    def kernels_of(
        self,
        num_rows: int,
        *,
        rank_bucket: int,
        few: bool,
        mixtures: Collection[Mixture] = (),
        dtype: torch.dtype,
    ) -> Hashable:
        experts = (
            self._experts.kernels_of(num_rows, mixture, dtype, rank_bucket=rank_bucket, few=few)
            for mixture in mixtures
        )
        return (bucket_of(ROW_BUCKETS, num_rows), block_rows_of(num_rows, few), *experts)

    def lora_add_(
        self, y: Tensor, x: Tensor, site: Site, arena: Tensor, tables: SlotTables, routing: Routing
    ) -> None:
        table, sizes = _table_of(site, tables), [part.size for part in site.slices]
        self._launch(y, x, table, sizes, site.bias, arena, routing, beside=False)

    def lora_delta_(
        self,
        delta: Tensor,
        x: Tensor,
        site: Site,
        arena: Tensor,
        tables: SlotTables,
        routing: Routing,
    ) -> None:
        """Semantics: delta[t] = B (A x[t]), and -0.0 where a row's slot has no weights.

        delta ``[T, out]``. Adding -0.0 leaves every bit as it was. Not for DoRA.
        """
        table, sizes = _table_of(site, tables), [part.size for part in site.slices]
        self._launch(delta, x, table, sizes, None, arena, routing, beside=True)

    def linear_beside(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        """The base's product and, on a second stream at the same time, the delta.

        weight ``[out, in]``; table: the site's rows of the slot tables. The delta is whole when
        this returns, as far as the current stream is concerned.
        """
        assert self._bound is not None, "compiled layers run before the ops are bound"
        arena, routing = self._bound
        delta = x.new_empty(x.shape[0], weight.shape[0])
        with self._step.aside():
            self._launch(delta, x, table, sizes, None, arena, routing, beside=True)
        y = F.linear(x, weight, bias)
        self._step.join()
        return y, delta

    def linear_in_place(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor, sizes: list[int]
    ) -> Tensor:
        """The base's product, then LoRA on top of it; this form knows DoRA."""
        assert self._bound is not None, "compiled layers run before the ops are bound"
        arena, routing = self._bound
        y = F.linear(x, weight, bias)
        self._launch(y, x, table, sizes, bias, arena, routing, beside=False)
        return y

    def _launch(
        self,
        y: Tensor,
        x: Tensor,
        table: Tensor,
        sizes: list[int],
        bias: Tensor | None,
        arena: Tensor,
        routing: Routing,
        *,
        beside: bool,
    ) -> None:
        first = column = 0
        for part in launches_of(sizes):
            self._launch_slices(
                y[:, column:],
                x,
                table[first : first + len(part)],
                part,
                None if bias is None else bias[column:],
                arena,
                routing,
                beside=beside,
            )
            first += len(part)
            column += sum(part)

    def _launch_slices(
        self,
        y: Tensor,
        x: Tensor,
        table: Tensor,
        sizes: tuple[int, ...],
        bias: Tensor | None,
        arena: Tensor,
        routing: Routing,
        *,
        beside: bool,
    ) -> None:
        """Up to ``MAX_SLICES`` slices, by one launch of each kernel."""
        pieces = Pieces(routing.device_segments, routing.sorted_rows)
        step, planes, ranks = self._step, self._planes, self._step.rank_bucket
        tiles = self._chooser.choose(x.shape[1], sizes, x.shape[0], ranks, step.few)
        needed = plane_elements(tiles, len(sizes), pieces, ranks)
        assert needed <= planes.numel(), "the workspace is sized for the largest step"
        launch_shrink(step.run, x, planes, arena, table, pieces, ranks, tiles)
        launch_expand(
            step.run, y, planes, arena, table, sizes, bias, pieces, ranks, tiles, beside=beside
        )


def _table_of(site: Site, tables: SlotTables) -> Tensor:
    first = site.slices[0].module
    return tables.table[first : first + len(site.slices)]
