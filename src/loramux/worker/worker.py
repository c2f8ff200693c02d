"""Carries out plans: weights in and out of slots, one forward, the next tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.identity import adapter_id
from loramux.adapters.spec import BaseLayout, ModuleShape, PreparedAdapter
from loramux.errors import AdapterRefused, ConfigError
from loramux.lora.device_store import DeviceStore
from loramux.lora.host_memory import HostMemory
from loramux.lora.host_store import HostStore
from loramux.lora.lanes import lanes_of
from loramux.lora.layers import LoraContext
from loramux.lora.own import OwnParts
from loramux.lora.own_weights import own_values
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.lora.transfers import Transfers
from loramux.lora.weights import HostCopy, ModuleTable, pack
from loramux.model.anatomy import Anatomy, linear_weight
from loramux.model.attention_seam import AttentionSeam, PagedLayer
from loramux.model.experts import expert_weight, mixtures_of
from loramux.model.load import BaseModel
from loramux.model.surgery import insert_sites
from loramux.ops.attention import AttentionBackend
from loramux.ops.interface import LoraOps
from loramux.plan import SequenceStep, SlotLoad, SlotOrder, StepPlan
from loramux.types import AdapterId, RequestId, Slot
from loramux.worker import pooling, vocabularies
from loramux.worker.captured_runner import CapturedRunner, CompiledOptions
from loramux.worker.drawing import draw_for
from loramux.worker.eager_runner import EagerRunner
from loramux.worker.graphs import GraphKey
from loramux.worker.inputs import StepInputs, build_inputs
from loramux.worker.launched import LaunchedStep, SampledTokens
from loramux.worker.logprobs import PromptLogprobs, prompt_logprobs
from loramux.worker.runner import Captured, Computed, Progress, Runner
from loramux.worker.sampler import Sampler

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
        host_memory: HostMemory,
        max_step_tokens: int,
        max_rank: int,
        lenient: bool = False,
        compiled: CompiledOptions | None = None,
        runs_ahead: bool = False,
    ) -> None:
        """``lenient``: see ``AdapterOptions``. ``compiled``: compile the layers and capture decode
        steps; None runs the model as it is. ``runs_ahead``: a launch returns before the device is
        done.
        """
        device = base.model.device
        self._base = base
        self._anatomy = anatomy
        self._seam = seam
        self.max_rank = max_rank
        """Of adapters, by the options."""
        self._lenient = lenient
        self._host = HostStore()
        self.host_memory = host_memory
        self._reading = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._transfers = Transfers(*lanes_of(device))
        self._device = DeviceStore(arena_bytes, base.dtype, device, self._transfers)
        self._tables = SlotTables(len(anatomy.modules), num_slots, device)
        self._sampler = Sampler(draw_for(device))
        self.runs_ahead = runs_ahead
        self._last_tokens = SampledTokens.none(device)
        self._contents: dict[int, AdapterId] = {}
        self._generation = -1
        """Of the newest load. An engine's begin with 1; 0 is for what happens before."""
        uploads = None if compiled is None else compiled.uploads
        routing = Routing(num_slots, max_step_tokens, device, uploads)
        self._own = OwnParts(routing)
        context = LoraContext(
            ops,
            self._device.arena,
            self._tables,
            routing,
            self._own,
            None if compiled is None else compiled.ops.number,
        )
        named = (*anatomy.norms, *anatomy.layout.routers)
        self._others = {name: base.model.get_submodule(name) for name in named}
        self._linears = insert_sites(base.model, anatomy, context)
        mixtures = mixtures_of(base.model, anatomy.layout.experts)
        if compiled is None:
            self._runner: Runner = EagerRunner(
                base, backend, context, max_step_tokens=max_step_tokens, mixtures=mixtures
            )
        else:
            compiled.ops.bind(context.arena, context.routing)
            self._runner = CapturedRunner(
                base,
                backend,
                context,
                compiled,
                runs=anatomy.runs,
                max_step_tokens=max_step_tokens,
                mixtures=mixtures,
            )
        self.use_attention(backend)

    def use_attention(self, backend: AttentionBackend) -> None:
        """Compute attention by another backend, as with a KV cache of another size.

        Nothing of the old one is kept; only before ``warm_up``, which captures its addresses.
        """
        self._seam.connect(lambda layer: PagedLayer(backend.layer(layer)))
        self._runner.use_attention(backend)

    @property
    def arena_bytes(self) -> int:
        """Device memory of adapters."""
        return self._device.arena.nbytes

    @property
    def num_slots(self) -> int:
        """Slots beside the base's, which is the one of this number."""
        return self._tables.num_slots

    @property
    def first_graphs(self) -> list[GraphKey]:
        """What ``warm_up`` captures."""
        return self._runner.first_graphs

    @property
    def modules(self) -> ModuleTable:
        """The modules that can take LoRA."""
        return self._anatomy.modules

    @property
    def layer_shapes(self) -> tuple[ModuleShape, ...]:
        """Of the linears in the layers, which are the first of ``modules``."""
        return self._anatomy.layer_shapes

    @property
    def layout(self) -> BaseLayout:
        """The base, as readers of adapters see it."""
        return self._anatomy.layout

    @property
    def dtype(self) -> torch.dtype:
        """Of the base's weights and of adapters in their blocks."""
        return self._base.dtype

    def read_adapter(self, name: str, directory: Path) -> PreparedAdapter:
        """Read and check an adapter, in any thread. Raises AdapterError with every reason."""
        loaded = read_adapter(
            name,
            directory,
            self._anatomy.layout,
            max_rank=self.max_rank,
            lenient=self._lenient,
        )
        # What DoRA computes on a GPU stands beside the steps.
        with torch.cuda.stream(self._reading):
            copy = pack(
                loaded.spec,
                loaded.tensors,
                self._anatomy.modules,
                self._base.dtype,
                self._base_weight,
                own=own_values(
                    loaded.spec,
                    loaded.tensors,
                    self._anatomy.layout.modules,
                    self._base.dtype,
                    self._base_parameter,
                ),
            )
        if not copy.block.is_finite():
            raise AdapterRefused(name, [_NOT_FINITE])
        try:
            copy = replace(copy, block=self.host_memory.keep(copy.block))
        except ConfigError as problem:  # the memory for it is there no more
            raise AdapterRefused(name, [str(problem)]) from problem
        return PreparedAdapter(
            adapter_id=adapter_id(loaded.spec, loaded.tensors),
            num_bytes=copy.num_bytes,
            max_rank=loaded.spec.max_rank,
            warnings=loaded.spec.warnings,
            content=copy,
            vocab_size=loaded.spec.vocab_size,
        )

    def install(self, prepared: PreparedAdapter) -> None:
        """Keep an adapter's weights on the host, ready for a slot."""
        copy = prepared.content
        assert isinstance(copy, HostCopy)
        self._host.add(prepared.adapter_id, copy)
        if not copy.own and not self._changes_ends(copy):  # else its steps are never captured
            self._runner.expect(copy.max_rank, has_gain=copy.placements.has_gain)

    def use_spare_time(self) -> bool:
        """Do a part of what later steps would be slower without; False when nothing is left."""
        return self._runner.use_spare_time()

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
                self._own.clear(order.slot)
            if isinstance(order, SlotLoad):
                assert order.generation > self._generation, "a slot order came twice or out of turn"
                self._generation = order.generation
                self._contents[order.slot] = order.adapter_id
                moved = self._device.load(order.slot, self._host[order.adapter_id].block)
                for slot in (order.slot, *moved):
                    self._tell_place(slot)
        self._tables.flush()

    def has_arrived(self, slot: Slot) -> bool:
        """Whether a slot's weights are there, so that a step with them would not wait."""
        return self._transfers.has_arrived(slot)

    def _tell_place(self, slot: Slot) -> None:
        """Write down where a slot's block stands now."""
        copy = self._host[self._contents[slot]]
        start = self._device.start_of(slot)
        self._tables.set(slot, copy.placements, start // self._device.unit)
        block = self._device.arena[start : start + copy.block.num_elements]
        self._own.set(
            slot,
            copy.own,
            block,
            ends=self._changes_ends(copy),
            vocab_size=copy.vocab_size,
        )

    def _changes_ends(self, copy: HostCopy) -> bool:
        """Whether LoRA is on the embedding or the head, which stand behind the layers' linears."""
        first = len(self._anatomy.layer_shapes)
        ends = range(first, first + self._anatomy.num_ends)
        return copy.placements.any_in(ends)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Put a step behind what the device does already; only its ``result()`` waits."""
        began = time.perf_counter()
        self.apply(plan.slot_orders)
        load_seconds = time.perf_counter() - began
        inputs = build_inputs(plan, self._last_tokens.rows)
        logits, states = self.forward(inputs, plan.sequences)
        samples = [s.sample for s in inputs.sampled if s.sample is not None]
        vocab_sizes = [self._vocab_size_of(s.slot) for s in inputs.sampled]
        step = LaunchedStep(
            plan.sequences,
            vocabularies.launch(self._sampler, logits[: len(samples)], samples, vocab_sizes),
            self._prompt_logprobs(logits[len(samples) :], plan.sequences),
            self._pooling(states, plan.sequences),
            load_seconds,
        )
        self._last_tokens = step.tokens
        return step

    def forward(self, inputs: StepInputs, sequences: Sequence[SequenceStep]) -> Computed:
        """Logits and hidden states, good until the next step.

        A row has as many logits as its adapter has tokens; what is beyond means nothing.
        """
        slots = {s.slot for s in sequences} - {self._tables.num_slots}
        with self._transfers.step(slots):
            return self._runner.run(inputs, sequences, self._last_tokens.token_ids)

    def warm_up(self, progress: Progress, *, step_bytes: int = 0) -> Captured:
        """Compile and capture what steps will need; little to do where neither is done.

        ``step_bytes``: device memory that the largest step takes and gives back.
        """
        base = self._base
        self._sampler.warm_up(base.vocab_size, base.dtype, base.model.device)
        return self._runner.warm_up(progress, step_bytes=step_bytes)

    def _base_weight(self, module: int) -> Tensor:
        if module < len(self._linears):
            return linear_weight(self._linears[module])
        return expert_weight(self._base.model, self._anatomy.modules.names[module])

    def _base_parameter(self, module: str, parameter: str) -> Tensor:
        holder = self._others.get(module)
        if holder is None:
            holder = self._linears[self._anatomy.modules.index[module]]
        return getattr(holder, parameter)

    def _vocab_size_of(self, slot: Slot) -> int:
        return self._own.vocab_size_of(slot) or self._base.vocab_size

    def _pooling(
        self, states: Tensor | None, sequences: Sequence[SequenceStep]
    ) -> pooling.Pooling | None:
        """Launch what makes vectors of hidden states, if any sequence asks for one."""
        if all(s.hidden is None for s in sequences):
            return None
        assert states is not None, "a step with a row that is not sampled from is no decode step"
        return pooling.launch(states, sequences)

    def _prompt_logprobs(
        self, logits: Tensor, sequences: Sequence[SequenceStep]
    ) -> dict[RequestId, PromptLogprobs]:
        """Launch the log-probabilities of prompt tokens; ``logits`` has their rows in order."""
        found: dict[RequestId, PromptLogprobs] = {}
        for s in sequences:
            tokens = s.next_prompt_tokens
            if s.prompt_logprobs is not None:
                rows = logits[: len(tokens), : self._vocab_size_of(s.slot)]
                found[s.request_id] = prompt_logprobs(rows, tokens, s.prompt_logprobs)
            if tokens:
                logits = logits[len(tokens) :]
        return found
