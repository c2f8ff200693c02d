"""CUDA graphs of steps: one for each bucket and kind of step, replayed for any adapters."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from loramux.lora.layers import Form
from loramux.model.compile import MIN_ROWS
from loramux.ops.attention import StepKind
from loramux.ops.tiles import FEW_ADAPTERS
from loramux.worker.capture import capture, rehearse


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph is captured for; everything else is read from fixed buffers."""

    bucket: int
    """Rows, padding included."""
    form: Form
    rank_bucket: int = 0
    """Ranks that the LoRA launches are made for; 0 without LoRA."""
    few: bool = True
    """At most ``FEW_ADAPTERS`` adapters take part, as they always do without LoRA."""
    kind: StepKind = StepKind.DECODE


_MIXED_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)


def mixed_buckets(max_step_tokens: int) -> list[int]:
    """Rows of mixed steps with graphs of their own; larger steps keep the GPU busy without.

    The last one holds the largest step where that is no larger: chunks of prompts fill it.
    """
    largest = min(max_step_tokens, _MIXED_SIZES[-1])
    return [size for size in _MIXED_SIZES if size < largest] + [max(largest, MIN_ROWS)]


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes with graphs of their own: padding is at most a quarter, and mostly less."""
    sizes = [MIN_ROWS, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, max_num_seqs + 64, 64)
    return [size for size in sizes if size < max_num_seqs] + [max(max_num_seqs, MIN_ROWS)]


class KernelsOf(Protocol):
    """``CompiledOps.kernels_of`` for one model."""

    def __call__(self, num_rows: int, *, rank_bucket: int, few: bool) -> Hashable: ...


def first_of_each(kernels: Callable[[int], Hashable], low: int, high: int) -> list[int]:
    """The least of the sizes ``low … high`` for each that ``kernels`` gives, which never comes back
    to what it was."""
    if kernels(low) == kernels(high):
        return [low]
    middle = (low + high) // 2
    left, right = first_of_each(kernels, low, middle), first_of_each(kernels, middle + 1, high)
    if kernels(left[-1]) == kernels(right[0]):
        del right[0]
    return left + right


class StepGraphs:
    """Captures steps and replays them.

    All graphs share one memory pool, because they never run at the same time and nothing of one
    outlives its step but the logits, which are copied out.
    """

    def __init__(
        self,
        logits: Tensor,
        max_step_tokens: int,
        prepare: Callable[[GraphKey], None],
        forward: Callable[[GraphKey], Tensor],
        kernels_of: KernelsOf,
    ) -> None:
        """``prepare`` sets buffers up for an empty step of a key; ``forward`` computes its logits
        ``[rows, vocab]`` from the buffers; ``logits [most rows, vocab]`` is where they go."""
        self._max_rows = max_step_tokens
        self._buckets = {
            StepKind.DECODE: buckets(logits.shape[0]),
            StepKind.MIXED: mixed_buckets(max_step_tokens),
        }
        self._logits = logits
        self._prepare = prepare
        self._forward = forward
        self._kernels_of = kernels_of
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def bucket_of(self, kind: StepKind, num_rows: int) -> int | None:
        """The smallest bucket that holds so many rows; None where there is none."""
        return next((bucket for bucket in self._buckets[kind] if bucket >= num_rows), None)

    def keys(self, form: Form, rank_bucket: int, num_slots: int) -> list[GraphKey]:
        """What all steps of a form and a rank bucket are captured for."""
        return [
            GraphKey(bucket, form, rank_bucket, few, kind)
            for kind, sizes in self._buckets.items()
            for bucket in sizes
            for few in ((True,) if form is Form.NONE else _mixes(bucket, num_slots))
        ]

    def samples(self, form: Form, rank_bucket: int, num_slots: int) -> list[GraphKey]:
        """Steps of a form and a rank bucket that together launch whatever such a step can: ones
        that are captured, and ones of other sizes where these launch something else."""
        found: list[GraphKey] = []
        graphs = self.keys(form, rank_bucket, num_slots)
        for few in {key.few for key in graphs}:
            kernels = partial(self._kernels_of, rank_bucket=rank_bucket, few=few)
            captured = {kernels(key.bucket): key for key in graphs if key.few is few}
            for rows in first_of_each(kernels, MIN_ROWS, self._max_rows):
                other = GraphKey(rows, form, rank_bucket, few, StepKind.EAGER)
                found.append(captured.get(kernels(rows), other))
        return found

    def rehearse(self, key: GraphKey) -> None:
        """Run an empty step once, for what is made at a first call."""
        self._prepare(key)
        rehearse(lambda: self._forward(key), self._stream)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def capture(self, key: GraphKey) -> None:
        """Capture an empty step; its buffers are left set up for that."""
        self.rehearse(key)

        def run() -> None:
            logits = self._forward(key)
            self._logits[: len(logits)].copy_(logits)

        self._graphs[key] = capture(run, self._stream, self._pool)

    def replay(self, key: GraphKey) -> Tensor:
        """Run a captured step; its logits ``[rows, vocab]``, good until the next replay."""
        self._graphs[key].replay()
        return self._logits


def _mixes(bucket: int, num_slots: int) -> tuple[bool, ...]:
    """Whether few adapters take part: a step of so few rows or slots cannot have many."""
    return (False, True) if min(bucket, num_slots) > FEW_ADAPTERS else (True,)
