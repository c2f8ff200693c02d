"""Carries out plans: weights in and out of slots, one forward, the next tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from loramux.adapters.formats.peft import read_peft
from loramux.adapters.identity import adapter_id
from loramux.adapters.spec import PreparedAdapter
from loramux.errors import AdapterRefused
from loramux.lora.device_store import DeviceStore
from loramux.lora.host_store import HostStore
from loramux.lora.layers import LoraContext
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.weights import HostCopy, pack
from loramux.model.anatomy import Anatomy, linear_weight
from loramux.model.attention_seam import AttentionSeam, PagedHandler
from loramux.model.load import BaseModel
from loramux.model.surgery import insert_sites
from loramux.ops.attention import AttentionBackend
from loramux.ops.interface import LoraOps
from loramux.plan import SequenceResult, SequenceStep, SlotLoad, SlotOrder, StepPlan, StepResult
from loramux.types import AdapterId, RequestId, TokenLogprobs
from loramux.worker.finished import FinishedStep, with_pending_tokens
from loramux.worker.inputs import StepInputs, build_inputs
from loramux.worker.logprobs import prompt_logprobs
from loramux.worker.sampler import Sampled, Sampler

log = logging.getLogger(__name__)

_NOT_FINITE = (
    "its weights are not finite once the scale is multiplied in, or DoRA divides by the norm of a "
    "row of the adapted weight that is zero: PEFT would give NaN, too"
)


class Worker:
    """One base model with its adapters on one device.

    Everything but ``read_adapter`` is called from one thread, between or within steps.
    """

    def __init__(
        self,
        base: BaseModel,
        anatomy: Anatomy,
        seam: AttentionSeam,
        backend: AttentionBackend,
        ops: LoraOps,
        *,
        num_slots: int,
        arena_bytes: int,
        max_step_tokens: int,
        max_rank: int,
        runs_ahead: bool = False,
    ) -> None:
        device = base.model.device
        self._base = base
        self._anatomy = anatomy
        self._backend = backend
        self._ops = ops
        self._max_rank = max_rank
        self.runs_ahead = runs_ahead
        self._host = HostStore()
        self._device = DeviceStore(arena_bytes, base.dtype, device)
        self._tables = SlotTables(len(anatomy.modules), num_slots, device)
        self._routing = Routing(num_slots, max_step_tokens, device)
        self._sampler = Sampler()
        context = LoraContext(ops, self._device.arena, self._tables, self._routing)
        self._linears = insert_sites(base.model, anatomy, context)
        self._contents: dict[int, AdapterId] = {}
        self._generation = 0
        self._last_tokens: dict[RequestId, int | None] = {}
        seam.handler = PagedHandler(backend, anatomy.attention)

    def read_adapter(self, name: str, directory: Path) -> PreparedAdapter:
        """Read and check an adapter, in any thread. Raises AdapterError with every reason."""
        loaded = read_peft(name, directory, self._anatomy.layout, max_rank=self._max_rank)
        copy = pack(
            loaded.spec, loaded.tensors, self._anatomy.modules, self._base.dtype, self._base_weight
        )
        if not copy.block.isfinite().all():
            raise AdapterRefused(name, [_NOT_FINITE])
        return PreparedAdapter(
            adapter_id=adapter_id(loaded.spec, loaded.tensors),
            num_bytes=copy.num_bytes,
            max_rank=loaded.spec.max_rank,
            warnings=loaded.spec.warnings,
            content=copy,
        )

    def install(self, prepared: PreparedAdapter) -> None:
        """Keep an adapter's weights on the host, ready for a slot."""
        assert isinstance(prepared.content, HostCopy)
        self._ops.reserve(prepared.max_rank)
        self._host.add(prepared.adapter_id, prepared.content)

    def drop(self, adapter_id: AdapterId) -> None:
        """Free the host copy of an adapter that has no slot any more."""
        assert adapter_id not in self._contents.values(), "a slot still holds the adapter"
        self._host.drop(adapter_id)

    def apply(self, orders: Sequence[SlotOrder]) -> None:
        """Carry out slot orders, in their order."""
        for order in orders:
            if order.slot in self._contents:
                del self._contents[order.slot]
                self._device.clear(order.slot)
                self._tables.clear(order.slot)
            if isinstance(order, SlotLoad):
                assert order.generation > self._generation, "a slot order came twice or out of turn"
                self._generation = order.generation
                self._contents[order.slot] = order.adapter_id
                moved = self._device.load(order.slot, self._host[order.adapter_id].block)
                for slot in (order.slot, *moved):
                    placements = self._host[self._contents[slot]].placements
                    start = self._device.start_of(slot) // self._device.unit
                    self._tables.set(slot, placements, start)
        self._tables.flush()

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Run one step; results stand in the order of the plan's sequences."""
        plan = with_pending_tokens(plan, self._last_tokens)
        self.apply(plan.slot_orders)
        inputs = build_inputs(plan)
        logits = self.forward(inputs, plan.sequences)
        samples = [s.sample for s in inputs.sampled if s.sample is not None]
        sampled = iter(self._sampler(logits[: len(samples)], samples))
        prompt_rows = logits[len(samples) :]
        results: list[SequenceResult] = []
        for sequence in plan.sequences:
            count = len(sequence.next_prompt_tokens)
            results.append(
                _result(
                    sequence,
                    next(sampled) if sequence.sample is not None else None,
                    _prompt_logprobs(prompt_rows[:count], sequence),
                )
            )
            prompt_rows = prompt_rows[count:]
        self._last_tokens = {r.request_id: r.token_id for r in results}
        return FinishedStep(StepResult(tuple(results)))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, sequences: Sequence[SequenceStep]) -> Tensor:
        """Logits ``[rows, vocab]`` of ``inputs.logit_rows``."""
        self._routing.fill([s.slot for s in sequences], [len(s.token_ids) for s in sequences])
        self._backend.begin_step(inputs.attention)
        device = self._base.model.device
        output = self._base.model(
            input_ids=inputs.token_ids.to(device),
            position_ids=inputs.positions.to(device),
            use_cache=False,
            logits_to_keep=inputs.logit_rows.to(device),
        )
        return output.logits[0]

    def _base_weight(self, module: int) -> Tensor:
        return linear_weight(self._linears[module])


def _prompt_logprobs(logits: Tensor, sequence: SequenceStep) -> tuple[TokenLogprobs, ...]:
    if sequence.prompt_logprobs is None:
        return ()
    return prompt_logprobs(logits, sequence.next_prompt_tokens, sequence.prompt_logprobs)


def _result(
    sequence: SequenceStep, sampled: Sampled | None, prompt: tuple[TokenLogprobs, ...]
) -> SequenceResult:
    if sampled is None:
        return SequenceResult(sequence.request_id, prompt_logprobs=prompt)
    return SequenceResult(
        sequence.request_id,
        token_id=sampled.token_id,
        logprobs=sampled.logprobs,
        prompt_logprobs=prompt,
        error=sampled.error,
    )
