"""Which graphs are captured at start, and which kind of step takes which."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loramux.lora.layers import Form, LoraContext
from loramux.lora.own import OwnParts
from loramux.lora.routing import Routing
from loramux.lora.slots import SlotTables
from loramux.ops.attention import StepKind
from loramux.ops.expert_tiles import Mixture
from loramux.ops.reference import ReferenceOps
from loramux.ops.tiles import FEW_ADAPTERS
from loramux.ops.triton_lora import TritonOps
from loramux.ops.tuning import ROW_BUCKETS, bucket_of
from loramux.ops.upload import Uploads
from loramux.plan import StepPlan
from loramux.worker import captured_runner, eager_runner
from loramux.worker.captured_runner import CapturedRunner, CompiledOptions
from loramux.worker.eager_runner import EagerRunner
from loramux.worker.graphs import (
    GraphKey,
    KernelsOf,
    StepGraphs,
    buckets,
    first_of_each,
    mixed_buckets,
)
from loramux.worker.inputs import build_inputs
from tests.cpu.captures import capture_without_gpu
from tests.cpu.served import part

SLOTS = FEW_ADAPTERS + 2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_without_gpu(monkeypatch)


@pytest.fixture
def graphs() -> StepGraphs:
    """Graphs of steps of up to 32 rows."""
    return make_graphs(kernels_of)


def kernels_of(num_rows: int, *, rank_bucket: int, few: bool) -> Hashable:
    return bucket_of(ROW_BUCKETS, num_rows)


def make_graphs(kernels_of: KernelsOf) -> StepGraphs:
    return StepGraphs(
        torch.zeros(32, 1), 128, lambda key: None, lambda key: torch.zeros(1, 1), kernels_of
    )


def first_keys(graphs: StepGraphs, num_slots: int = 32) -> list[GraphKey]:
    """Steps of the base, and of plain adapters of small ranks."""
    return [*graphs.keys(Form.NONE, 0, num_slots), *graphs.keys(Form.BESIDE, 16, num_slots)]


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [(1, [2]), (40, [40]), (64, [64]), (96, [64, 96]), (1024, None), (8192, None)],
)
def test_there_is_a_graph_for_every_mixed_step_up_to_1024_rows(
    max_step_tokens: int, sizes: list[int] | None
) -> None:
    found = mixed_buckets(max_step_tokens)
    assert found == (sizes or [64, 128, 192, 256, 384, 512, 768, 1024])
    assert found[-1] >= min(max_step_tokens, 1024)


def test_base_few_and_many_are_captured_for_every_bucket_that_can_have_them(
    graphs: StepGraphs,
) -> None:
    keys = first_keys(graphs)
    assert len(set(keys)) == len(keys)
    for kind, sizes in ((StepKind.DECODE, buckets(32)), (StepKind.MIXED, mixed_buckets(128))):
        assert {key.bucket for key in keys if key.kind is kind} == set(sizes)
        for size in sizes:
            found = {
                (k.form, k.rank_bucket, k.few) for k in keys if (k.bucket, k.kind) == (size, kind)
            }
            many = {(Form.BESIDE, 16, False)} if size > FEW_ADAPTERS else set()
            assert found == {(Form.NONE, 0, True), (Form.BESIDE, 16, True)} | many


def test_few_slots_have_no_graphs_for_many_adapters(graphs: StepGraphs) -> None:
    assert {key.few for key in graphs.keys(Form.BESIDE, 16, num_slots=FEW_ADAPTERS)} == {True}


@pytest.mark.parametrize("form", [Form.NONE, Form.BESIDE, Form.IN_PLACE])
@pytest.mark.parametrize("top_k", [None, 2, 8])
def test_samples_launch_all_that_steps_of_any_size_can(form: Form, top_k: int | None) -> None:
    ops = TritonOps(padded_rows={16: 16}, max_rank=64, device=CPU)
    mixtures = [] if top_k is None else [Mixture(8, top_k)]
    kernels_of = partial(ops.kernels_of, mixtures=mixtures, dtype=torch.bfloat16)
    graphs = StepGraphs(
        torch.zeros(96, 1), 3000, lambda key: None, lambda key: torch.zeros(1, 1), kernels_of
    )

    def kernels(rows: int, few: bool) -> Hashable:
        return few, kernels_of(rows, rank_bucket=64, few=few)

    samples = graphs.samples(form, 64, num_slots=32)
    assert {(key.form, key.rank_bucket) for key in samples} == {(form, 64)}
    found = [kernels(key.bucket, key.few) for key in samples]
    assert len(set(found)) == len(found), "what is compiled once more takes time"
    mixes = (True,) if form is Form.NONE else (True, False)
    assert set(found) == {kernels(rows, few) for rows in range(2, 3001) for few in mixes}
    others = [key for key in samples if key.kind is StepKind.EAGER]
    captured = graphs.keys(form, 64, num_slots=32)
    assert {*samples} - {*others} <= {*captured}
    assert not {kernels(key.bucket, key.few) for key in others} & {
        kernels(key.bucket, key.few) for key in captured
    }


@pytest.mark.parametrize("last", [*range(8, 20)])
def test_the_first_of_each_is_found(last: int) -> None:
    assert first_of_each(lambda size: size // 5, 3, last) == [
        3,
        *(size for size in (5, 10, 15) if size <= last),
    ]


def test_what_any_adapter_needs_is_compiled_at_start(
    context: LoraContext, graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = captured(context, monkeypatch)
    made: list[GraphKey] = []
    shown: list[GraphKey] = []

    def rehearse(key: GraphKey) -> None:
        assert isinstance(context.ops, NotingOps)
        assert context.ops.compiles, "one kernel after another takes too long"
        made.append(key)

    monkeypatch.setattr(graphs, "rehearse", rehearse)
    monkeypatch.setattr(graphs, "capture", shown.append)
    monkeypatch.setattr(runner, "_graphs", graphs)
    monkeypatch.setattr(captured_runner, "alike_left_out", lambda model, runs: nullcontext())

    runner.warm_up(lambda what, keys: keys)

    for form, ranks in itertools.product((Form.BESIDE, Form.IN_PLACE), (16, 64)):
        assert {*graphs.samples(form, ranks, SLOTS)} <= {*made}
    assert {Form.NONE, Form.OWN} < {key.form for key in made}
    assert [key.bucket for key in shown] == sorted((key.bucket for key in shown), reverse=True)
    assert {*shown} == {*first_keys(graphs, num_slots=SLOTS)}
    assert len(shown) == len({*shown})


class NotingOps(ReferenceOps):
    """Notes how steps begin."""

    number = 0
    rank_buckets = (16, 64)

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, bool]] = []
        self.compiles = False

    def begin_step(self, max_rank: int, *, few: bool) -> None:
        self.begun.append((max_rank, few))

    def bind(self, arena: torch.Tensor, routing: object) -> None:
        pass

    def bucket_of(self, max_rank: int) -> int:
        return 16 if max_rank <= 16 else 64

    def kernels_of(self, num_rows: int, **_: object) -> None:
        pass

    @contextmanager
    def compiling(self) -> Iterator[None]:
        self.compiles = True
        yield
        self.compiles = False


class Base:
    """A model of five tokens, all alike; an attention without state."""

    vocab_size, dtype, device = 5, torch.float32, CPU

    @property
    def model(self) -> Base:
        return self

    def modules(self) -> list[object]:
        return []

    def __call__(self, *, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 5))

    def begin_step(self, *_: Any, **__: Any) -> None:
        pass


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> LoraContext:
    """Slots whose adapters have rank 8, and DoRA in the last one; a model without states."""
    states = SimpleNamespace(take=lambda: None)
    for module in (captured_runner, eager_runner):
        monkeypatch.setattr(module, "FinalStates", lambda model: states)
    tables = SlotTables(1, SLOTS, CPU)
    for slot in range(SLOTS):
        tables.max_rank[slot] = 8
    tables.has_gain[SLOTS - 1] = True
    routing = Routing(SLOTS, 64, CPU)
    return LoraContext(NotingOps(), torch.zeros(1), tables, routing, OwnParts(routing))


def captured(context: LoraContext, monkeypatch: pytest.MonkeyPatch) -> CapturedRunner:
    monkeypatch.setattr(captured_runner, "compile_layers", lambda model, runs, compiler: None)
    options = CompiledOptions(context.ops, Uploads(CPU), 8, capture=False)  # type: ignore[arg-type]
    return CapturedRunner(
        Base(),
        Base(),
        context,
        options,
        runs=(),
        max_step_tokens=64,  # type: ignore[arg-type]
    )


def step(slots: Sequence[int], tokens: int = 1) -> StepPlan:
    return StepPlan((), tuple(part([1] * tokens, slot, blocks=[i]) for i, slot in enumerate(slots)))


FEW = [0, 1, 2, 3, SLOTS, 0, 1]
MANY = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("slots", "few", "form"),
    [
        ([SLOTS] * 8, True, Form.NONE),
        ([0], True, Form.BESIDE),
        (FEW, True, Form.BESIDE),
        (MANY, False, Form.BESIDE),
        ([SLOTS - 1, SLOTS], True, Form.IN_PLACE),
        ([*MANY, SLOTS - 1], False, Form.IN_PLACE),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_is_set_up_for_as_many_adapters_as_it_has(
    context: LoraContext,
    monkeypatch: pytest.MonkeyPatch,
    slots: list[int],
    few: bool,
    form: Form,
    tokens: int,
) -> None:
    plan = step(slots, tokens)
    inputs = build_inputs(plan, {})
    for runner in (
        captured(context, monkeypatch),
        EagerRunner(Base(), Base(), context, max_step_tokens=64),
    ):  # type: ignore[arg-type]
        runner.run(inputs, plan.sequences, torch.zeros(1, dtype=torch.int64))
        rows = len(inputs.token_ids)
        capacity = min(rows, (FEW_ADAPTERS if few else SLOTS) + 1 + rows // 16)
        if rows > 1:  # one row is padded where layers are compiled
            assert context.routing.device_segments.grid == capacity
    assert context.form.value == form
    assert isinstance(context.ops, NotingOps)
    assert [begun for _, begun in context.ops.begun] == [few, few]
