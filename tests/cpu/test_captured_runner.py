"""Start and captured steps without a GPU: a graph computes again what was captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from peft import LoraConfig
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from loramux.lora.segments import padded_rows
from loramux.ops.triton_lora import TritonOps
from loramux.ops.upload import Uploads
from loramux.plan import SequenceStep
from loramux.testing import tiny_model
from loramux.worker.captured_runner import CapturedRunner, CompiledOptions
from tests.cpu import served
from tests.cpu.captures import capture_without_gpu
from tests.cpu.served import ADAPTERS, BASE, SLOTS, Served, part
from tests.cpu.test_compiled_layers import CPU, PROMPT, OpaqueAttention
from tests.cpu.test_experts import EXPERTS, build, per_expert, write
from tests.cpu.test_own_values import save

PARTS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_without_gpu(monkeypatch)
    # The interpreter compiles nothing.
    monkeypatch.setattr(TritonOps, "compiling", lambda self: nullcontext())


class WithExperts(Served):
    """Its adapters are on experts: all of them, some, and with a rank of another bucket."""

    def add(self, name: str, *, rank: int, seed: int, dora: bool = False, **how: object) -> None:
        experts, ranks = {
            "one": (range(EXPERTS), (4,)),
            "two": ((0, 2), (1, 5)),
            "three": ((1,), (20,)),
        }[name]
        if not (self._folder / name).exists():
            weights = per_expert(self.base.model, PARTS, experts, ranks, seed=100 * seed)
            write(self._folder / name, weights)
        self.add_saved(name)


def experts_model() -> PreTrainedModel:
    return build("Qwen3MoeConfig", num_layers=6)


def dense_model() -> PreTrainedModel:
    return tiny_model(num_layers=6)


def decoding(slots: Sequence[int]) -> list[SequenceStep]:
    """The prompt's last token of each, the others being known."""
    return [row(slot, i, start=len(PROMPT) - 1) for i, slot in enumerate(slots)]


def row(slot: int, block: int, start: int = 0) -> SequenceStep:
    """A part that a graph can compute: log-probabilities of what is chosen alone."""
    whole = part(PROMPT, slot, start=start, blocks=[block])
    return whole._replace(prompt_logprobs=None, next_prompt_tokens=())


def start(kind: type[Served], folder: Path, compiler: CompileCounter) -> Served:
    """With graphs of all that is captured at start."""
    ops = TritonOps(padded_rows=padded_rows(SLOTS, 64), max_rank=64, device=CPU)
    options = CompiledOptions(ops, Uploads(CPU), max_num_seqs=4, compiler=compiler)
    model = kind(folder, attention=OpaqueAttention, ops=ops, compiled=options)
    shown: list[str] = []
    found = model.worker.warm_up(lambda what, keys: shown.append(what) or keys)
    assert shown == ["compiling", "capturing graphs"]
    assert found.num_graphs == len(model.worker.first_graphs) > 0
    return model


def use_all_time(served: Served) -> None:
    """Until every graph is there."""
    while served.worker.use_spare_time():
        pass


def assert_alike(captured: Served, eager: Served, mixes: Sequence[Sequence[int]]) -> None:
    """In steps with prompts and in such as decode."""
    for slots in mixes:
        prompts = [row(slot, i) for i, slot in enumerate(slots)]
        for step in (prompts, decoding(slots)):
            for got, wanted in zip(captured.run(*step), eager.run(*step), strict=True):
                assert got == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "model"), [(Served, dense_model), (WithExperts, experts_model)], ids=["dense", "moe"]
)
def test_after_a_start_steps_are_replayed_and_compile_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Served],
    model: Callable[[], PreTrainedModel],
) -> None:
    monkeypatch.setattr(served, "tiny_model", model)
    eager, compiler = kind(tmp_path), CompileCounter()
    captured = start(kind, tmp_path, compiler)
    compiled = compiler.frame_count
    for both in (eager, captured):
        both.worker.apply([both.load(slot, name) for slot, name in enumerate(ADAPTERS)])
    mixes = [[BASE], [0, BASE], [1], [0, 1, 2, BASE], [2, 2]]
    assert_alike(captured, eager, mixes)
    use_all_time(captured)
    monkeypatch.setattr(CapturedRunner, "_run_uncaptured", None)  # every step has its graph
    assert_alike(captured, eager, mixes[1:4])
    assert compiler.frame_count == compiled


def test_a_step_has_the_same_bits_with_its_graph_as_before(tmp_path: Path) -> None:
    captured = start(Served, tmp_path, CompileCounter())
    worker = captured.worker
    worker.apply([captured.load(slot, name) for slot, name in enumerate(ADAPTERS)])
    steps = [[row(slot, i) for i, slot in enumerate([0, 1, BASE])], decoding([1, 2])]
    before = [captured.run(*step) for step in steps]
    use_all_time(captured)
    assert [captured.run(*step) for step in steps] == before


def test_nor_do_they_for_the_first_adapter_with_parts_of_its_own(tmp_path: Path) -> None:
    eager, compiler = Served(tmp_path), CompileCounter()
    captured = start(Served, tmp_path, compiler)
    compiled = compiler.frame_count
    own = ["norm", "input_layernorm", "k_proj", "lm_head"]
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=own, use_dora=True)
    save(tiny_model(), config, tmp_path / "own")
    for both in (eager, captured):
        both.add_saved("own")
        both.worker.apply([both.load(0, "own"), both.load(1, "three")])
    assert_alike(captured, eager, [[0, 1, BASE]])
    assert compiler.frame_count == compiled
