"""Puts an engine together; the only place that names concrete parts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loramux.adapters.catalog import Catalog
from loramux.adapters.registry import Registry
from loramux.adapters.sources import AdapterSources
from loramux.adapters.spec import BaseLayout, ModuleShape
from loramux.adapters.target_modules import is_open, restrict
from loramux.config import BLOCK_SIZE, EngineOptions, StepLimits, parse_bytes
from loramux.engine.adapter_text import LanguageReader
from loramux.engine.admission import Admission
from loramux.engine.admission import Limits as RequestLimits
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.core import EngineCore
from loramux.engine.languages import Language, Languages
from loramux.engine.service import EngineService
from loramux.engine.text import HFText
from loramux.errors import AdapterError, ModelNotServable
from loramux.lora.host_memory import host_memory_for
from loramux.lora.weights import block_bytes
from loramux.model.anatomy import Anatomy, examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import BaseModel, load_base
from loramux.ops.attention import AttentionBackend
from loramux.scheduling.steps import Limits
from loramux.types import Slot
from loramux.worker.arena import Arena, KnownAdapter, default_arena, free_memory, size_of
from loramux.worker.backends import Backends, choose_backends
from loramux.worker.graphs import GraphKey
from loramux.worker.memory import (
    DeviceUse,
    KvSizes,
    blocks_of,
    give_back_unused,
    in_use,
    kv_budget,
    longest_part,
    measure,
    must_fit,
    weight_bytes,
)
from loramux.worker.memory_report import GpuMemory, MemoryReport
from loramux.worker.runner import Captured
from loramux.worker.self_check import self_check
from loramux.worker.worker import Worker

log = logging.getLogger(__name__)

_DEFAULT_KV_BYTES = 2 * 2**30
_DEFAULT_RANK = 64
"""The default arena holds ``max_loras`` adapters of this rank on all linears that they may change:
without experts, on which adapters are as large as a model."""
_READ_AT_ONCE = 2
"""Adapters that may stand in host memory before the budget has made room for them."""
_REPORTED_RANKS = (16, 64)
"""The log tells how many adapters of these ranks the arena holds."""


@dataclass(frozen=True)
class Parts:
    """A built engine without a thread."""

    core: EngineCore
    worker: Worker
    admission: Admission
    languages: Languages
    base_name: str
    limits: StepLimits
    base_shape: str
    """The same for bases on which adapters have the same sizes."""
    sources: AdapterSources = field(default_factory=AdapterSources)
    captured: Captured = field(default_factory=Captured)

    def service(
        self,
        *,
        max_open: int,
        adapters: Sequence[tuple[str, str]] = (),
        registry: Registry | None = None,
    ) -> EngineService:
        """The same with a thread, not started; see ``EngineService`` for what it takes."""
        return EngineService(
            self.core,
            self.worker,
            self.admission,
            self.languages,
            base_name=self.base_name,
            max_open=max_open,
            adapters=adapters,
            sources=self.sources,
            registry=registry,
        )


def build_async_engine(
    base: str,
    options: EngineOptions | None = None,
    adapters: Mapping[str, str] | None = None,
    served_name: str | None = None,
    registry: Registry | None = None,
) -> AsyncEngine:
    """An engine in a thread of this process, which ``await engine.start()`` sets going.

    Raises ConfigError, ModelNotServable, or RegistryUnusable for one of another base.
    """
    return AsyncEngine(build_service(base, options, adapters, served_name, registry))


def build_service(
    base: str,
    options: EngineOptions | None = None,
    adapters: Mapping[str, str] | None = None,
    served_name: str | None = None,
    registry: Registry | None = None,
    *,
    base_alias: str | None = None,
) -> EngineService:
    """The same without streams. Raises as above.

    ``base_alias``: the name of the base in requests, and so in the options, where a server before
    the engine has another one for it.
    """
    options, adapters = options or EngineOptions(), adapters or {}
    parts = build_parts(
        base,
        options,
        served_name,
        adapters=adapters,
        registry=registry,
        base_alias=base_alias,
    )
    return parts.service(
        max_open=options.scheduler.max_waiting + parts.limits.max_num_seqs,
        adapters=tuple(adapters.items()),
        registry=registry,
    )


def build_parts(
    base: str,
    options: EngineOptions,
    served_name: str | None = None,
    *,
    adapters: Mapping[str, str] | None = None,
    registry: Registry | None = None,
    base_alias: str | None = None,
) -> Parts:
    """Load a base model and its tokenizer and build an engine. Raises as above.

    The rest as in ``assemble``.
    """
    model = load_base(base, options.model)
    return assemble(
        model,
        load_tokenizer(model.name),
        options,
        served_name or base,
        adapters=adapters,
        registry=registry,
        base_alias=base_alias,
    )


def assemble(
    model: BaseModel,
    tokenizer: PreTrainedTokenizerBase,
    options: EngineOptions,
    base_name: str,
    *,
    adapters: Mapping[str, str] | None = None,
    registry: Registry | None = None,
    base_alias: str | None = None,
    runs_ahead: bool = False,
) -> Parts:
    """Build an engine around a model that is in memory. Raises as above.

    ``adapters``, by name and source, and those of ``registry`` are what the engine will serve from
    the start on: here they are only asked for their sizes, and the registry for being of this base.
    ``base_alias``: as ``build_service`` has it.
    ``runs_ahead``: launch a step before the one before is known, also where that gains nothing.
    """
    device = model.model.device
    limits = options.scheduler.limits(device.type)
    weights = weight_bytes(model.model)
    seam = AttentionSeam(model.model)
    anatomy = examine(model, seam)
    layout = restrict(anatomy.layout, options.adapters.lora_target_modules)
    anatomy = replace(anatomy, layout=layout)
    num_slots = options.adapters.max_loras
    base_shape = _base_shape(model, anatomy)
    if registry is not None:
        registry.bind(base_shape)
    sources = AdapterSources(options.sources)
    largest = _largest_adapter(adapters or {}, registry, sources, layout, model.dtype, options)
    arena = _arena(model, anatomy, largest, options)
    host_bytes = options.adapters.host_bytes(arena.num_bytes)
    read_bytes = max(arena.slot_bytes, 0 if largest is None else largest.num_bytes)
    host_memory = host_memory_for(device, host_bytes + _READ_AT_ONCE * read_bytes)
    backends = choose_backends(model, anatomy, limits, options)
    kv = KvSizes.of(
        anatomy.attention,
        model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=limits.max_num_seqs,
    )
    num_blocks = _first_blocks(kv, limits, device, options)
    attention = _attention(backends, num_blocks)
    worker = Worker(
        model,
        anatomy,
        seam,
        attention,
        backends.ops,
        num_slots=num_slots,
        arena_bytes=arena.num_bytes,
        host_memory=host_memory,
        max_step_tokens=limits.max_step_tokens,
        max_rank=options.adapters.max_rank,
        lenient=options.adapters.lenient,
        compiled=backends.compiled,
        runs_ahead=runs_ahead or backends.compiled is not None,
    )
    use = None
    if device.type == "cuda":
        use = measure(worker, kv, limits, kv_bytes=attention.kv_bytes)
        if options.scheduler.kv_cache is None:
            share, num_layers = options.scheduler.gpu_memory, len(anatomy.attention)
            budget = kv_budget(use, share, limits, worker.first_graphs, num_layers)
            num_blocks = kv.blocks_planned(budget)
            attention = _attention(backends, num_blocks)
            worker.use_attention(attention)
            give_back_unused()
    host_memory.wait(timeout=0)  # what has failed by now need not wait for compilers
    captured = worker.warm_up(_progress, step_bytes=0 if use is None else use.step)
    host_memory.wait()
    if options.model.self_check:
        worst = self_check(
            model,
            worker,
            seam,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_step_tokens=limits.max_step_tokens,
            base_slot=Slot(num_slots),
        )
        log.info("self-check passed: logits within %.1e standard deviations", worst)
    languages = Languages(
        Language(HFText(tokenizer, model.eos_token_ids), model.eos_token_ids),
        LanguageReader(tokenizer, model.eos_token_ids).read,
    )
    catalog = Catalog(base_name)
    core = EngineCore(
        worker,
        languages,
        catalog,
        limits=Limits(limits.max_num_seqs, limits.max_step_tokens, BLOCK_SIZE),
        num_blocks=num_blocks,
        num_slots=num_slots,
        arena_bytes=arena.num_bytes,
        host_bytes=host_bytes,
        max_host_copies=options.adapters.max_cpu_loras,
        adapter_max_wait=options.adapters.adapter_max_wait,
        weights=options.scheduler.weights(base_alias or base_name),
        slot_bytes=arena.slot_bytes,
    )
    prefix_block = BLOCK_SIZE if options.scheduler.prefix_cache else None
    limits_of_requests = RequestLimits(model.max_model_len, model.vocab_size, prefix_block)
    admission = Admission(catalog, limits_of_requests, languages)
    log.info(
        "serving %s: %s, %s attention, %s LoRA op",
        base_name,
        str(model.dtype).removeprefix("torch."),
        attention.name,
        backends.ops.name,
    )
    report = MemoryReport(
        weights=weights,
        kv_cache=attention.kv_bytes,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        arena=worker.arena_bytes,
        num_slots=num_slots,
        adapters=_reported(anatomy.layer_shapes, model.dtype),
        with_experts=_reported((*anatomy.layer_shapes, *anatomy.expert_shapes), model.dtype)
        if anatomy.expert_shapes
        else {},
        largest=largest,
        gpu=None if use is None else _gpu_memory(use, limits, backends, captured),
    )
    log.info("memory:\n%s", "\n".join(report.lines()))
    if device.type == "cuda":
        # A full collection would go through all that a model is made of, and every request would
        # wait for it; what is there now stays as long as the engine.
        gc.collect()
        gc.freeze()
    return Parts(
        core, worker, admission, languages, base_name, limits, base_shape, sources, captured
    )


def _first_blocks(
    kv: KvSizes, limits: StepLimits, device: torch.device, options: EngineOptions
) -> int:
    """Blocks of the cache; on a GPU, where it is planned, those of the largest step alone."""
    if options.scheduler.kv_cache is not None:
        return kv.blocks_chosen(parse_bytes(options.scheduler.kv_cache))
    if device.type == "cuda":
        return blocks_of(longest_part(limits, kv.max_model_len))
    return kv.blocks_by_default(_DEFAULT_KV_BYTES)


def _attention(backends: Backends, num_blocks: int) -> AttentionBackend:
    with must_fit("the KV cache"):
        return backends.attention(num_blocks)


def _gpu_memory(
    use: DeviceUse, limits: StepLimits, backends: Backends, captured: Captured
) -> GpuMemory:
    return GpuMemory(
        lora_workspace=backends.workspace_bytes,
        step=use.step,
        max_step_tokens=limits.max_step_tokens,
        num_graphs=captured.num_graphs,
        graphs=captured.num_bytes,
        in_use=in_use(),
        total=use.total,
    )


def _progress(what: str, keys: Sequence[GraphKey]) -> Iterable[GraphKey]:
    return track(keys, what, console=Console(stderr=True), transient=True)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory. Raises ModelNotServable."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelNotServable(path, f"its tokenizer cannot be read: {error}") from error


def _base_shape(model: BaseModel, anatomy: Anatomy) -> str:
    dtype = str(model.dtype).removeprefix("torch.")
    modules = zip(anatomy.modules.names, anatomy.modules.shapes, strict=True)
    digest = sha256(repr((dtype, model.vocab_size, sorted(modules))).encode()).hexdigest()
    return f"{anatomy.layout.model_type} {dtype} {digest[:12]}"


def _reported(shapes: Sequence[ModuleShape], dtype: torch.dtype) -> dict[int, int]:
    return {rank: block_bytes(shapes, rank, dtype) for rank in _REPORTED_RANKS}


def _largest_adapter(
    adapters: Mapping[str, str],
    registry: Registry | None,
    sources: AdapterSources,
    layout: BaseLayout,
    dtype: torch.dtype,
    options: EngineOptions,
) -> KnownAdapter | None:
    """Of what will be served from the start on; without what cannot be, as its load will say."""
    records = [] if registry is None else registry.records()
    known = [KnownAdapter(r.name, r.num_bytes) for r in records if r.name not in adapters]
    max_rank, lenient = options.adapters.max_rank, options.adapters.lenient
    for name, source in adapters.items():
        with suppress(AdapterError), sources.open(name, source) as folder:
            size = size_of(name, folder, layout, dtype, max_rank=max_rank, lenient=lenient)
            known.append(KnownAdapter(name, size))
    return max(known, key=lambda adapter: adapter.num_bytes, default=None)


def _arena(
    model: BaseModel, anatomy: Anatomy, largest: KnownAdapter | None, options: EngineOptions
) -> Arena:
    """As the options say, or as large as it should be."""
    if options.adapters.device_cache is not None:
        return Arena(parse_bytes(options.adapters.device_cache), slot_bytes=0)
    named = zip(anatomy.modules.names, anatomy.layer_shapes, strict=False)
    shapes = [shape for name, shape in named if is_open(anatomy.layout, name)]
    plain_bytes = block_bytes(shapes, _DEFAULT_RANK, model.dtype)
    free_bytes = free_memory(model.model.device)
    return default_arena(options.adapters.max_loras, plain_bytes, largest, free_bytes)
