"""Runs the forward of a step as the modelling code has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from loramux.lora.layers import LoraContext
from loramux.model.final_states import FinalStates
from loramux.model.load import BaseModel
from loramux.ops.attention import AttentionBackend
from loramux.ops.expert_tiles import Mixture
from loramux.ops.interface import CompiledOps
from loramux.plan import SequenceStep
from loramux.worker.graphs import GraphKey
from loramux.worker.inputs import StepInputs
from loramux.worker.rehearsal import rehearse_kernels
from loramux.worker.runner import Captured, Computed, Progress, mix_of

log = logging.getLogger(__name__)


class EagerRunner:
    """Calls the model."""

    def __init__(
        self,
        base: BaseModel,
        backend: AttentionBackend,
        context: LoraContext,
        *,
        max_step_tokens: int,
        mixtures: Collection[Mixture] = (),
    ) -> None:
        """``mixtures``: kinds of layers with experts."""
        self._max_step_tokens = max_step_tokens
        self._mixtures = mixtures
        self._base = base
        self._backend = backend
        self._context = context
        self._states = FinalStates(base.model)

    @torch.inference_mode()
    def run(
        self, inputs: StepInputs, sequences: Sequence[SequenceStep], last_tokens: Tensor
    ) -> Computed:
        context, slots = self._context, [s.slot for s in sequences]
        max_rank, few, form = mix_of(slots, context)
        counts = [len(s.token_ids) for s in sequences]
        context.routing.fill(slots, counts, few=few)
        context.ops.begin_step(max_rank, few=few)
        num_logits = len(inputs.logit_rows)
        context.own.begin_step(slots, counts, inputs.logit_rows, num_logits=num_logits, few=few)
        context.form.set(form)
        self._backend.begin_step(inputs.attention)
        device = self._base.model.device
        token_ids = torch.from_numpy(inputs.token_ids).to(device)
        pending = torch.from_numpy(inputs.pending_rows).to(device)
        token_ids[pending] = last_tokens[torch.from_numpy(inputs.pending_sources).to(device)]
        output = self._base.model(
            input_ids=token_ids[None],
            position_ids=torch.from_numpy(inputs.positions)[None].to(device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(inputs.logit_rows).to(device),
        )
        return Computed(output.logits[0], self._states.take())

    @property
    def first_graphs(self) -> list[GraphKey]:
        return []

    @torch.inference_mode()
    def warm_up(self, progress: Progress, *, step_bytes: int = 0) -> Captured:
        """Have the kernels compiled that LoRA and experts launch, where they have any."""
        ops, began = self._context.ops, time.perf_counter()
        if not isinstance(ops, CompiledOps):
            return Captured()
        with ops.compiling():
            rehearse_kernels(
                self._base, ops, max_rows=self._max_step_tokens, mixtures=self._mixtures
            )
        captured = Captured(compile_seconds=time.perf_counter() - began)
        log.info("compiled kernels in %.1f s", captured.compile_seconds)
        return captured

    def expect(self, max_rank: int, *, has_gain: bool) -> None:
        pass

    def use_spare_time(self) -> bool:
        return False

    def use_attention(self, backend: AttentionBackend) -> None:
        self._backend = backend
