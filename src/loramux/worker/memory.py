"""How a device's memory is shared out: what everything else needs decides the KV cache."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from loramux.adapters.spec import PreparedAdapter
from loramux.config import BLOCK_SIZE, StepLimits
from loramux.errors import ConfigError
from loramux.lora.host_memory import HostBlock
from loramux.lora.weights import HostCopy, block_bytes, plain_placements
from loramux.ops.attention import AttentionLayer
from loramux.plan import Sample, SequenceStep, SlotClear, SlotLoad, StepPlan
from loramux.types import AdapterId, RequestId, SamplingParams, Slot
from loramux.worker.graphs import GraphKey
from loramux.worker.worker import Worker

_GRAPH_BYTES_PER_LAYER = 2**18
"""What a captured step takes beside its pool: some 15 launches a layer with their parameters."""


@dataclass(frozen=True)
class KvSizes:
    """What a KV cache must hold, in its own measures."""

    block_bytes: int
    max_model_len: int
    max_num_seqs: int

    @staticmethod
    def of(
        layers: Mapping[int, AttentionLayer],
        dtype: torch.dtype,
        *,
        max_model_len: int,
        max_num_seqs: int,
    ) -> KvSizes:
        """Those of a model."""
        per_token = sum(
            kv.num_kv_heads * (kv.key_dim + kv.value_dim) * dtype.itemsize
            for kv in (layer.kv for layer in layers.values())
        )
        return KvSizes(per_token * BLOCK_SIZE, max_model_len, max_num_seqs)

    @property
    def sequence_blocks(self) -> int:
        """Blocks of one sequence of the greatest length."""
        return blocks_of(self.max_model_len)

    def blocks_chosen(self, num_bytes: int) -> int:
        """Blocks in a cache whose size somebody has chosen. Raises ConfigError."""
        return self._enough(num_bytes // self.block_bytes, self._larger)

    def blocks_by_default(self, num_bytes: int) -> int:
        """Blocks that are needed, in a cache of at most a fixed size. Raises ConfigError."""
        return self._enough(self._no_more_than_needed(num_bytes), self._larger)

    def blocks_planned(self, num_bytes: int) -> int:
        """Blocks that are needed, in what is left of a GPU's memory. Raises ConfigError."""
        remedy = "a larger --gpu-memory, a smaller --device-cache or --max-step-tokens"
        return self._enough(self._no_more_than_needed(num_bytes), remedy)

    @property
    def _larger(self) -> str:
        return f"--kv-cache {self.sequence_blocks * self.block_bytes} or more"

    def _no_more_than_needed(self, num_bytes: int) -> int:
        return min(self.max_num_seqs * self.sequence_blocks, num_bytes // self.block_bytes)

    def _enough(self, num_blocks: int, remedy: str) -> int:
        if num_blocks >= self.sequence_blocks:
            return num_blocks
        num_tokens = max(num_blocks, 0) * BLOCK_SIZE
        raise ConfigError(
            f"the KV cache holds {num_tokens} tokens and one sequence may have "
            f"{self.max_model_len}: start with {remedy}, or with --max-model-len "
            f"{max(num_tokens, 1)} or less"
        )


@dataclass(frozen=True)
class DeviceUse:
    """Bytes of a GPU's memory, measured while there is no KV cache and no graph."""

    total: int
    in_use: int
    """By weights, arena, workspaces, buffers and kernels, and by other processes."""
    step: int
    """What the largest step takes on top and gives back."""


def kv_budget(
    use: DeviceUse, share: float, limits: StepLimits, graphs: Sequence[GraphKey], num_layers: int
) -> int:
    """Bytes that are left for keys and values when ``share`` of the memory may be in use.

    All graphs have one pool, which holds what the largest captured step has under way: by its rows,
    a part of the largest step of all.
    """
    pool = use.step * max((g.bucket for g in graphs), default=0) // limits.max_step_tokens
    captured = pool + len(graphs) * num_layers * _GRAPH_BYTES_PER_LAYER
    return int(share * use.total) - use.in_use - use.step - captured


def blocks_of(num_tokens: int) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return -(-num_tokens // BLOCK_SIZE)


def longest_part(limits: StepLimits, max_model_len: int) -> int:
    """Tokens of the longest sequence in ``largest_step``."""
    return min(max_model_len, limits.max_step_tokens - limits.max_num_seqs + 1)


def largest_step(limits: StepLimits, max_model_len: int, slot: Slot) -> StepPlan:
    """A step that needs as much memory as one can.

    Every token is there, in sequences of very different lengths, each sequence draws its next token
    and reports all log-probabilities. They share their blocks, whose content does not matter.
    """
    blocks = range(blocks_of(longest_part(limits, max_model_len)))
    sequences: list[SequenceStep] = []
    left = limits.max_step_tokens
    for others in reversed(range(limits.max_num_seqs)):
        count = min(max_model_len, left - others)
        left -= count
        tokens = (0,) * count
        sequences.append(
            SequenceStep(
                request_id=RequestId(f"largest-step-{others}"),
                token_ids=tokens,
                start=0,
                block_table=blocks[: blocks_of(count)],
                slot=slot,
                sample=Sample(_DRAWN, seed=0, tokens=tokens, num_prompt_tokens=count, position=0),
                prompt_logprobs=0,
                next_prompt_tokens=tokens[1:],
            )
        )
    return StepPlan((), tuple(sequences))


_DRAWN = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)


def measure(worker: Worker, kv: KvSizes, limits: StepLimits, *, kv_bytes: int) -> DeviceUse:
    """Run the largest step on a GPU that has a KV cache of ``kv_bytes``. Raises ConfigError.

    The layers are not compiled for it, as they will be once more for the real cache; they need
    rather more memory than compiled ones.
    """
    adapter = _smallest_adapter(worker)
    fits = adapter.num_bytes <= worker.arena_bytes
    slot = Slot(0 if fits else worker.num_slots)
    worker.install(adapter)
    if fits:
        worker.apply((SlotLoad(slot, adapter.adapter_id, generation=0),))
    give_back_unused()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with must_fit("the largest step"), torch.compiler.set_stance("force_eager"):
        worker.launch(largest_step(limits, kv.max_model_len, slot)).result()
    step = torch.cuda.max_memory_reserved() - before
    if fits:
        worker.apply((SlotClear(slot),))
    worker.drop(adapter.adapter_id)
    return DeviceUse(torch.cuda.mem_get_info()[1], in_use() - kv_bytes, step)


@contextmanager
def must_fit(what: str) -> Iterator[None]:
    """Say what to do when a GPU's memory runs out at start."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{what} does not fit into the GPU's memory: start with a smaller --kv-cache, "
            "--device-cache, --max-step-tokens or --max-num-seqs"
        ) from error


def in_use() -> int:
    """Bytes of the GPU's memory that are in use, by whomever, between steps."""
    give_back_unused()
    free, total = torch.cuda.mem_get_info()
    return total - free


def weight_bytes(model: nn.Module) -> int:
    """Memory of a model's weights and buffers, each counted once."""
    tensors = (*model.parameters(), *model.buffers())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def give_back_unused() -> None:
    """Return to the GPU what nothing holds any more."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def _smallest_adapter(worker: Worker) -> PreparedAdapter:
    """On one linear: enough to make every linear of a step do what LoRA takes. Experts take room by
    the largest rank of a step, which is that of this one."""
    shapes, rank = worker.layer_shapes, worker.max_rank if worker.layout.experts else 1
    module = min(range(len(shapes)), key=lambda i: block_bytes([shapes[i]], rank, worker.dtype))
    num_bytes = block_bytes([shapes[module]], rank, worker.dtype)
    block = HostBlock((torch.zeros(num_bytes // worker.dtype.itemsize, dtype=worker.dtype),))
    copy = HostCopy(block, plain_placements({module: shapes[module]}, rank, worker.dtype))
    return PreparedAdapter(AdapterId("largest-step"), num_bytes, rank, (), copy)
