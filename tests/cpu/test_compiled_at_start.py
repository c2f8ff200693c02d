"""Whatever a step launches has been compiled at start: steps of every size, form, rank and company.

Launches are noted in place of being carried out, in the words by which Triton tells kernels apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from loramux.lora.segments import padded_rows
from loramux.ops.tiles import DefaultTiles, Tiles
from loramux.ops.torch_attention import TorchAttention
from loramux.ops.triton_lora import TritonOps
from loramux.ops.tuning import ROW_BUCKETS, bucket_of
from loramux.ops.upload import Uploads
from loramux.plan import SequenceStep, StepPlan
from loramux.types import RequestId
from loramux.worker.captured_runner import CompiledOptions
from tests.cpu import served
from tests.cpu.captures import capture_without_gpu
from tests.cpu.served import Served, part
from tests.cpu.test_captured_runner import (
    WithExperts,
    dense_model,
    experts_model,
    use_all_time,
)
from tests.cpu.test_compiled_layers import CPU, OpaqueAttention
from tests.cpu.test_own_values import save

NUM_SLOTS = 6
BASE = NUM_SLOTS
MAX_ROWS = 1100


class Notes:
    """Kernels that launches ask for."""

    def __init__(self) -> None:
        self.compiled: set[Hashable] = set()
        self.launched: set[Hashable] = set()
        self._found = self.launched

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        assert all(grid), "an empty launch"
        plain = kernel.kwargs["do_not_specialize"] or ()
        told = [
            (name, "any" if name in plain else _specialised(argument))
            for name, argument in zip(kernel.arg_names, arguments, strict=False)
        ]
        constants = sorted((name, str(value)) for name, value in options.items())
        self._found.add((kernel.fn.__name__, *told, *constants))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        self._found = self.compiled
        yield
        self._found = self.launched


def _specialised(argument: object) -> Hashable:
    """What of an argument makes another kernel."""
    if isinstance(argument, Tensor):
        return str(argument.dtype), argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument < 2**31
    return tuple(map(_specialised, argument)) if isinstance(argument, tuple) else argument


class TunedTiles(DefaultTiles):
    """Other tiles for each size of a step, as a table may have."""

    def choose(self, in_features: int, sizes: Sequence[int], rows: int, *args: Any) -> Tiles:
        tiles = super().choose(in_features, sizes, rows, *args)
        return replace(tiles, expand_stages=1 + [*ROW_BUCKETS].index(bucket_of(ROW_BUCKETS, rows)))


COMPANIES = {
    "base": [],
    "plain": ["one"],
    "with DoRA": ["two", "one"],
    "large": ["large", "one"],
    "many": ["one"] * 5,
    "many, large, with DoRA": ["one", "two", "three", "large", "one"],
    "own": ["own", "one"],
    "own, large": ["own", "large"],
    "many, own, large": ["own", "one", "one", "one", "large"],
}
DECODING = (1, 2, 3, 8, 16, 17, 33, 64, 65, 96, 127, 128, 129, 150)
TOKENS = (2, 5, 17, 63, 65, 70, 100, 127, 128, 131, 300, 700, 1023, 1024, 1025, 1100)
"""Of steps with prompts."""


def steps_of(slots: Sequence[int], max_num_seqs: int) -> Iterator[list[SequenceStep]]:
    """Steps of many sizes; where there is room, every slot takes part."""
    for size in (size for size in DECODING if size <= max_num_seqs):
        yield [tokens(i, slots[i % len(slots)], 1) for i in range(size)]
    for size in TOKENS:
        count = min(len(slots), size)
        lengths = [size - count + 1, *[1] * (count - 1)]
        for logprobs in (False, True):
            yield [tokens(i, slots[i], n, logprobs=logprobs) for i, n in enumerate(lengths)]


def tokens(number: int, slot: int, count: int, *, logprobs: bool = False) -> SequenceStep:
    whole = part([7] * count, slot, blocks=range(-(-count // 16)))
    whole = whole._replace(request_id=RequestId(f"{number}"))
    return whole if logprobs else whole._replace(prompt_logprobs=None, next_prompt_tokens=())


@pytest.mark.parametrize(
    ("kind", "model"), [(Served, dense_model), (WithExperts, experts_model)], ids=["dense", "moe"]
)
@pytest.mark.parametrize("max_num_seqs", [150, 8, None], ids=["many", "few", "not captured"])
def test_no_step_launches_what_was_not_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Served],
    model: Callable[[], PreTrainedModel],
    max_num_seqs: int | None,
) -> None:
    """Of so many sequences; None: where layers are neither compiled nor captured."""
    capture_without_gpu(monkeypatch)
    monkeypatch.setattr(served, "tiny_model", model)
    kind(tmp_path)  # writes the adapters, by the names that modules have before they are compiled
    notes, compiler = Notes(), CompileCounter()
    monkeypatch.setattr(TritonOps, "compiling", lambda self: notes.compiling())
    ops = TritonOps(
        padded_rows=padded_rows(NUM_SLOTS, MAX_ROWS),
        max_rank=64,
        device=CPU,
        chooser=TunedTiles(),
        launch=notes.launch,
    )
    engine = kind(
        tmp_path,
        num_slots=NUM_SLOTS,
        arena_bytes=2**24,
        num_blocks=200,
        max_tokens=MAX_ROWS,
        attention=TorchAttention if max_num_seqs is None else OpaqueAttention,
        ops=ops,
        compiled=None
        if max_num_seqs is None
        else CompiledOptions(ops, Uploads(CPU), max_num_seqs=max_num_seqs, compiler=compiler),
    )
    engine.worker.warm_up(lambda what, keys: keys)
    compiled = compiler.frame_count
    own = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], modules_to_save=["norm"])
    save(model(), own, tmp_path / "own")
    engine.add_saved("own")
    Served.add(engine, "large", rank=40, seed=9)
    for names in COMPANIES.values():
        orders = [engine.load(slot, name) for slot, name in enumerate(names)]
        engine.worker.apply(orders)
        for step in steps_of([*range(len(names)), BASE], max_num_seqs or max(DECODING)):
            engine.worker.launch(StepPlan((), tuple(step))).result()
    use_all_time(engine)
    assert notes.launched
    assert notes.launched <= notes.compiled
    assert compiler.frame_count == compiled
