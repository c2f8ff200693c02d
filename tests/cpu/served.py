"""A worker over a tiny model with three adapters, driven by plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from loramux.adapters.spec import PreparedAdapter
from loramux.lora.host_memory import HostBlock, OrdinaryMemory
from loramux.lora.weights import HostCopy
from loramux.model.anatomy import examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import adopt
from loramux.ops.attention import AttentionBackend
from loramux.ops.interface import LoraOps
from loramux.ops.reference import ReferenceOps
from loramux.ops.torch_attention import TorchAttention
from loramux.plan import Sample, SequenceResult, SequenceStep, SlotLoad, SlotOrder, StepPlan
from loramux.testing import random_adapter, tiny_model
from loramux.types import AdapterId, RequestId, SamplingParams, Slot
from loramux.worker.captured_runner import CompiledOptions
from loramux.worker.self_check import self_check
from loramux.worker.worker import Worker

SLOTS = 3
BASE = Slot(SLOTS)
BLOCK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = ("one", "two", "three")


class Served:
    """``one`` is plain, ``two`` has DoRA, ``three`` has other ranks on some modules."""

    def __init__(
        self,
        folder: Path,
        *,
        num_slots: int = SLOTS,
        arena_bytes: int = 2**20,
        num_blocks: int = 32,
        max_tokens: int = 64,
        attention: Callable[..., AttentionBackend] = TorchAttention,
        ops: LoraOps | None = None,
        compiled: CompiledOptions | None = None,
    ) -> None:
        self._folder = folder
        self.num_blocks, self.max_tokens = num_blocks, max_tokens
        self.base = adopt("tiny", tiny_model())
        self.seam = AttentionSeam(self.base.model)
        anatomy = examine(self.base, self.seam)
        self.layout = anatomy.layout
        self.worker = Worker(
            self.base,
            anatomy,
            self.seam,
            attention(anatomy.attention, num_blocks, BLOCK, self.base.dtype),
            ops or ReferenceOps(),
            num_slots=num_slots,
            arena_bytes=arena_bytes,
            host_memory=OrdinaryMemory(),
            max_step_tokens=max_tokens,
            max_rank=64,
            compiled=compiled,
        )
        self.prepared: dict[str, PreparedAdapter] = {}
        self._generation = 0
        self.add("one", rank=6, seed=1)
        self.add("two", rank=6, seed=2, dora=True)
        self.add("three", rank=6, seed=3, rank_pattern={"q_proj": 3, "up_proj": 9})

    def add(self, name: str, *, rank: int, seed: int, dora: bool = False, **how: object) -> None:
        """Write, read and install a random adapter."""
        random_adapter(
            self._folder / name,
            self.layout,
            rank=rank,
            targets=TARGETS,
            seed=seed,
            dora=dora,
            **how,  # type: ignore[arg-type]
        )
        self.add_saved(name)

    def add_saved(self, name: str) -> None:
        """Read and install an adapter whose files are in the folder."""
        self.prepared[name] = self.worker.read_adapter(name, self._folder / name)
        self.worker.install(self.prepared[name])

    def add_poisoned(self, name: str) -> None:
        """Install ``one`` again with NaN in it, which no adapter that is read can have."""
        copy = self.prepared["one"].content
        assert isinstance(copy, HostCopy)
        sick = replace(copy, block=HostBlock((torch.full_like(copy.block.whole, torch.nan),)))
        self.prepared[name] = replace(
            self.prepared["one"], adapter_id=AdapterId(name), content=sick
        )
        self.worker.install(self.prepared[name])

    def load(self, slot: int, name: str) -> SlotLoad:
        self._generation += 1
        return SlotLoad(Slot(slot), self.prepared[name].adapter_id, self._generation)

    def run(self, *sequences: SequenceStep, orders: Sequence[SlotOrder] = ()) -> list[list[float]]:
        """Log-probabilities of each sequence's prompt tokens and chosen token, in one step."""
        results = self.worker.launch(StepPlan(tuple(orders), sequences)).result().sequences
        assert [r.request_id for r in results] == [s.request_id for s in sequences]
        return [values(result) for result in results]

    def logprobs(self, name: str | None, tokens: Sequence[int]) -> Tensor:
        """What transformers, and PEFT for an adapter, make of tokens: ``[T, vocab]``."""
        model: torch.nn.Module = tiny_model()
        if name is not None:
            if (size := self.prepared[name].vocab_size) is not None:
                model.resize_token_embeddings(size, mean_resizing=False)  # type: ignore[operator]
            model = PeftModel.from_pretrained(model, str(self._folder / name)).eval()  # type: ignore[arg-type]
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)

    def expected(self, name: str | None, tokens: Sequence[int]) -> list[float]:
        """What ``run`` gives for a whole prompt by itself."""
        found = self.logprobs(name, tokens)
        following = found[torch.arange(len(tokens) - 1), list(tokens[1:])]
        return [*following.tolist(), float(found[-1].max())]

    def self_check(self) -> float:
        return self_check(
            self.base,
            self.worker,
            self.seam,
            block_size=BLOCK,
            num_blocks=self.num_blocks,
            max_step_tokens=self.max_tokens,
            base_slot=BASE,
        )


def part(
    tokens: Sequence[int],
    slot: int,
    *,
    start: int = 0,
    end: int | None = None,
    blocks: Sequence[int] = (5, 2),
    top: int = 0,
) -> SequenceStep:
    """Tokens ``start … end - 1`` of a prompt, with all their log-probabilities.

    The step that reads the last one chooses the next token, greedily.
    """
    end = len(tokens) if end is None else end
    last = end == len(tokens)
    greedy = SamplingParams(temperature=0, logprobs=top)
    return SequenceStep(
        request_id=RequestId(f"{blocks[0]}"),
        token_ids=tokens[start:end],
        start=start,
        block_table=blocks,
        slot=Slot(slot),
        sample=Sample(greedy, 0, tokens, len(tokens), 0) if last else None,
        prompt_logprobs=top,
        next_prompt_tokens=tokens[start + 1 : end + 1],
    )


def values(result: SequenceResult) -> list[float]:
    assert result.error is None
    chosen = [] if result.logprobs is None else [result.logprobs]
    return [entry.logprob for entry in (*result.prompt_logprobs, *chosen)]
