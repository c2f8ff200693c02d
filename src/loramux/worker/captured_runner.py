"""Runs the forward of a step compiled and, but for large steps, captured."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loramux.lora.ends import AdaptedHead
from loramux.lora.layers import Form, LoraContext
from loramux.model.compile import MIN_ROWS, compile_layers
from loramux.model.final_states import FinalStates
from loramux.model.load import BaseModel
from loramux.model.stack import alike_left_out
from loramux.ops.attention import AttentionBackend, StepKind
from loramux.ops.expert_tiles import Mixture
from loramux.ops.interface import CompiledOps
from loramux.ops.upload import Uploads
from loramux.plan import SequenceStep
from loramux.worker.graphs import GraphKey, StepGraphs, mixed_buckets
from loramux.worker.inputs import StepInputs
from loramux.worker.later_graphs import LaterGraphs
from loramux.worker.rehearsal import rehearse_kernels
from loramux.worker.runner import Captured, Computed, Progress, mix_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledOptions:
    """What compiled and captured steps need beside the model."""

    ops: CompiledOps
    uploads: Uploads
    max_num_seqs: int
    compiler: str | Callable[..., Any] = "inductor"
    capture: bool = True
    """False computes every step by the compiled layers, without graphs."""


class CapturedRunner:
    """Compiled layers over fixed buffers; all but large steps are replayed as graphs.

    At start everything is compiled that any adapter could need, because no step may wait for a
    compiler. Graphs are captured at start for plain adapters of small ranks, for others (DoRA,
    larger ranks) later (``LaterGraphs``), which takes a tenth of a second each.
    """

    def __init__(
        self,
        base: BaseModel,
        backend: AttentionBackend,
        context: LoraContext,
        options: CompiledOptions,
        *,
        runs: Sequence[Sequence[int]],
        max_step_tokens: int,
        mixtures: Collection[Mixture] = (),
    ) -> None:
        """``runs``: decoder layers that run as one (``model.stack``); ``mixtures``: kinds of layers
        with experts."""
        device = base.model.device
        self._max_step_tokens = max_step_tokens
        max_rows = max(max_step_tokens, MIN_ROWS)
        self._base = base
        self._backend = backend
        self._context = context
        self._ops = options.ops
        self._uploads = options.uploads
        self._runs = runs
        self._states = FinalStates(base.model)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._token_ids)
        self._logit_rows = torch.zeros_like(self._token_ids)
        self._pending_rows = torch.zeros_like(self._token_ids)
        self._pending_sources = torch.zeros_like(self._token_ids)
        self._graphs: StepGraphs | None = None
        self._later: LaterGraphs | None = None
        """From the start on, if steps are captured at all."""
        self._settled = False
        """Whether addresses stay as they are, so that steps may be captured."""
        self._max_logit_rows = max(options.max_num_seqs, MIN_ROWS)
        if options.capture:
            logits = torch.zeros(
                self._max_logit_rows, base.vocab_size, dtype=base.dtype, device=device
            )
            # What a graph leaves behind is given to the next one, but for what is copied out.
            self._kept_states = torch.zeros(
                mixed_buckets(max_rows)[-1], base.hidden_size, dtype=base.dtype, device=device
            )
            kernels_of = partial(self._ops.kernels_of, mixtures=mixtures, dtype=base.dtype)
            self._graphs = StepGraphs(logits, max_rows, self._prepare, self._compute, kernels_of)
        compile_layers(base.model, runs, options.compiler)

    @property
    def first_graphs(self) -> list[GraphKey]:
        if self._graphs is None:
            return []
        slots, rank_bucket = self._context.tables.num_slots, self._ops.rank_buckets[0]
        base, beside = (
            self._graphs.keys(form, rank, slots)
            for form, rank in ((Form.NONE, 0), (Form.BESIDE, rank_bucket))
        )
        # The largest makes the pool.
        return sorted([*base, *beside], key=lambda key: key.bucket, reverse=True)

    @torch.inference_mode()
    def warm_up(self, progress: Progress, *, step_bytes: int = 0) -> Captured:
        """Capture what most steps need."""
        self._settled = True
        if self._graphs is None:
            return Captured()
        started = time.perf_counter()
        free_before = torch.cuda.mem_get_info()[0]
        log.info("compiling the layers; what is made is kept, so the next start takes less time")
        with self._ops.compiling(), alike_left_out(self._base.model, self._runs):
            for key in progress("compiling", self._samples(self._graphs)):
                self._graphs.rehearse(key)
            # Empty steps launch nothing for the head.
            rehearse_kernels(
                self._base, self._ops, max_rows=self._max_step_tokens, kinds=(AdaptedHead,)
            )
        compiled = time.perf_counter()
        keys = self.first_graphs
        for key in progress("capturing graphs", keys):
            self._graphs.capture(key)
        num_slots = self._context.tables.num_slots
        self._later = LaterGraphs(self._graphs, num_slots, step_bytes=step_bytes)
        torch.cuda.synchronize()
        captured = Captured(
            num_graphs=len(keys),
            num_bytes=max(free_before - torch.cuda.mem_get_info()[0], 0),
            compile_seconds=compiled - started,
            capture_seconds=time.perf_counter() - compiled,
        )
        log.info(
            "compiled in %.1f s, captured %d graphs in %.1f s",
            captured.compile_seconds,
            captured.num_graphs,
            captured.capture_seconds,
        )
        return captured

    def _samples(self, graphs: StepGraphs) -> list[GraphKey]:
        """Steps that launch everything that any step can."""
        num_slots, ranks = self._context.tables.num_slots, self._ops.rank_buckets
        mixes = [(Form.NONE, 0), *itertools.product((Form.BESIDE, Form.IN_PLACE), ranks)]
        keys = [key for form, bucket in mixes for key in graphs.samples(form, bucket, num_slots)]
        # The layers are other ones then; their LoRA kernels are those of the form in place.
        return [*keys, graphs.samples(Form.OWN, ranks[0], num_slots)[0]]

    def expect(self, max_rank: int, *, has_gain: bool) -> None:
        if self._later is not None:
            self._later.expect(self._ops.bucket_of(max_rank), has_gain=has_gain)

    @torch.inference_mode()
    def use_spare_time(self) -> bool:
        return self._later is not None and self._later.capture_next()

    def use_attention(self, backend: AttentionBackend) -> None:
        assert not self._settled, "captured steps hold the addresses of the backend before"
        self._backend = backend

    @torch.inference_mode()
    def run(
        self, inputs: StepInputs, sequences: Sequence[SequenceStep], last_tokens: Tensor
    ) -> Computed:
        graphs, later = self._graphs, self._later
        kind = graph_kind(inputs, len(sequences))
        num_rows = max(len(inputs.token_ids), MIN_ROWS)
        bucket = graphs.bucket_of(kind, num_rows) if graphs and kind else None
        if graphs is None or later is None or kind is None or bucket is None:
            key = self._key(num_rows, sequences, StepKind.EAGER)
            return self._run_uncaptured(key, inputs, sequences, last_tokens)
        key = self._key(bucket, sequences, kind)
        # The host's tables route rows of own parts, step by step.
        if key.form is Form.OWN or not later.is_there(key):
            # All is as in a graph, the padding and the attention's kernels too, so that rows keep
            # every bit.
            return self._run_uncaptured(key, inputs, sequences, last_tokens)
        self._set_up(key, inputs, sequences)
        self._fill_pending(inputs, last_tokens)
        logits = graphs.replay(key)[: len(inputs.logit_rows)]
        return Computed(logits, self._kept_states if kind is StepKind.MIXED else None)

    def _run_uncaptured(
        self,
        key: GraphKey,
        inputs: StepInputs,
        sequences: Sequence[SequenceStep],
        last_tokens: Tensor,
    ) -> Computed:
        self._set_up(key, inputs, sequences)
        self._fill_pending(inputs, last_tokens)
        num_logits = len(inputs.logit_rows)
        logits, states = self._forward(key.bucket, self._rows_of(key, num_logits))
        if self._context.own.widest is not None:
            # Later steps read what is left here as padding, and may know the base's tokens only.
            self._token_ids.zero_()
        return Computed(logits[:num_logits], states)

    def _key(self, num_rows: int, sequences: Sequence[SequenceStep], kind: StepKind) -> GraphKey:
        max_rank, few, form = mix_of((s.slot for s in sequences), self._context)
        if form is Form.NONE:
            return GraphKey(num_rows, form, kind=kind)
        return GraphKey(num_rows, form, self._ops.bucket_of(max_rank), few, kind)

    def _set_up(self, key: GraphKey, inputs: StepInputs, sequences: Sequence[SequenceStep]) -> None:
        """Bring a step into the buffers that the forward reads."""
        self._uploads.begin_step()
        self._context.form.set(key.form)
        self._ops.begin_step(key.rank_bucket, few=key.few)
        slots, counts = [s.slot for s in sequences], [len(s.token_ids) for s in sequences]
        self._context.routing.fill(slots, counts, key.bucket, few=key.few)
        num_logits = self._num_logits(key, len(inputs.logit_rows))
        self._context.own.begin_step(
            slots, counts, inputs.logit_rows, num_logits=num_logits, few=key.few
        )
        self._backend.begin_step(inputs.attention, key.bucket, key.kind)
        self._uploads.copy(self._token_ids, inputs.token_ids)
        self._uploads.copy(self._positions, inputs.positions)
        # A graph takes as many rows as there could be: those beyond must exist, too.
        unused = max(0, self._max_logit_rows - len(inputs.logit_rows))
        self._uploads.copy(self._logit_rows, np.pad(inputs.logit_rows, (0, unused)))
        self._uploads.copy(self._pending_rows, inputs.pending_rows)
        self._uploads.copy(self._pending_sources, inputs.pending_sources)
        self._uploads.flush()

    def _fill_pending(self, inputs: StepInputs, last_tokens: Tensor) -> None:
        """Bring in the tokens that the step before samples, which the host does not know."""
        num_pending = len(inputs.pending_rows)
        if not num_pending:
            return
        found = last_tokens.index_select(0, self._pending_sources[:num_pending])
        self._token_ids.index_copy_(0, self._pending_rows[:num_pending], found)

    def _prepare(self, key: GraphKey) -> None:
        self._set_up(key, StepInputs.empty(), ())

    def _compute(self, key: GraphKey) -> Tensor:
        """What is captured."""
        logits, states = self._forward(key.bucket, self._rows_of(key))
        if key.kind is StepKind.MIXED:
            self._kept_states[: key.bucket].copy_(states)
        return logits

    def _rows_of(self, key: GraphKey, num_wanted: int = 0) -> Tensor | int:
        """The rows whose logits a step of a key computes, as ``_forward`` has them."""
        if key.kind is StepKind.DECODE:
            return 0
        return self._logit_rows[: self._num_logits(key, num_wanted)]

    def _num_logits(self, key: GraphKey, num_wanted: int) -> int:
        """How many these are: a graph's do not hang on how many are wanted."""
        if key.kind is StepKind.EAGER:
            return num_wanted
        return key.bucket if key.kind is StepKind.DECODE else min(key.bucket, self._max_logit_rows)

    def _forward(self, num_rows: int, logit_rows: Tensor | int) -> tuple[Tensor, Tensor]:
        """Logits ``[rows, vocab]`` and hidden states ``[num_rows, hidden]``.

        ``logit_rows`` 0 means all.
        """
        output = self._base.model(
            input_ids=self._token_ids[:num_rows][None],
            position_ids=self._positions[:num_rows][None],
            use_cache=False,
            logits_to_keep=logit_rows,
        )
        return output.logits[0], self._states.take()


def graph_kind(inputs: StepInputs, num_sequences: int) -> StepKind | None:
    """The kind of graph that can compute a step; None where none can."""
    num_tokens = len(inputs.token_ids)
    if num_tokens == num_sequences and np.array_equal(inputs.logit_rows, np.arange(num_tokens)):
        return StepKind.DECODE  # whose logits are those of all rows, in their order
    # Prompt log-probabilities can ask for more rows than a graph has room for.
    return StepKind.MIXED if len(inputs.logit_rows) <= num_sequences else None
