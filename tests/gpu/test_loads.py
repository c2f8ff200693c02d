"""Loads beside running steps on a GPU: nobody waits who need not, and nobody reads too early."""

from __future__ import annotations

import gc
import itertools
import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loramux import LLM, SamplingParams
from loramux.lora.device_store import DeviceStore
from loramux.lora.host_memory import HostBlock, PinnedMemory
from loramux.lora.lanes import CudaLane
from loramux.lora.transfers import Transfers
from loramux.lora.weights import HostCopy
from loramux.testing import random_adapter, tiny_model
from loramux.types import Slot
from loramux.worker.worker import Worker
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS

LONG = 200_000_000
"""Cycles, a tenth of a second and more."""
SIZE = 2**24


class Machine:
    def __init__(self, num_blocks: int) -> None:
        self.stream = torch.cuda.Stream()
        self.transfers = Transfers(CudaLane(), CudaLane(self.stream))
        device = torch.device("cuda")
        num_bytes = num_blocks * SIZE * 4
        self.store = DeviceStore(num_bytes, torch.float32, device, self.transfers)
        self.store.arena.zero_()
        torch.cuda.synchronize()

    def load(self, slot: int, block: Tensor) -> list[Slot]:
        return self.store.load(Slot(slot), HostBlock((block,)))

    def launch(self, *slots: int, cycles: int = 0) -> list[Tensor]:
        """A step that reads its slots' weights when it begins and again when it ends."""
        with self.transfers.step([Slot(slot) for slot in slots]):
            early = [self.part(slot).clone() for slot in slots]
            torch.cuda._sleep(cycles)
            return [*early, *(self.part(slot).clone() for slot in slots)]

    def part(self, slot: int) -> Tensor:
        start = self.store.start_of(Slot(slot))
        return self.store.arena[start : start + SIZE]


def pinned(value: float, size: int = SIZE) -> Tensor:
    """Made before anything runs that must go on: pinning may wait for the device."""
    return torch.full((size,), value).pin_memory()


def values(found: list[Tensor]) -> list[float]:
    """The one value of each tensor."""
    for tensor in found:
        assert tensor.min() == tensor.max(), "weights were read that are not whole"
    return [float(tensor[0]) for tensor in found]


def test_a_step_reads_whole_weights_of_a_slot_that_is_on_its_way() -> None:
    machine = Machine(2)
    machine.load(0, pinned(1.0))
    assert values(machine.launch(0)) == [1.0, 1.0]


def test_a_step_without_the_slot_does_not_wait_for_it() -> None:
    machine, second = Machine(2), pinned(2.0)
    machine.load(0, pinned(1.0))
    assert values(machine.launch(0)) == [1.0, 1.0]  # and the allocator has what it needs
    torch.cuda.synchronize()
    with torch.cuda.stream(machine.stream):
        torch.cuda._sleep(10 * LONG)  # as if the bus were slow
    machine.load(1, second)
    found = machine.launch(0)
    torch.cuda.current_stream().synchronize()
    assert not machine.stream.query(), "the step has waited for the load"
    assert values(found) == [1.0, 1.0]
    assert values(machine.launch(1)) == [2.0, 2.0]


def test_a_load_waits_for_the_running_step_whose_weights_it_overwrites() -> None:
    machine, first, second = Machine(1), pinned(1.0), pinned(2.0)
    machine.load(0, first)
    found = machine.launch(0, cycles=LONG)
    machine.store.clear(Slot(0))
    machine.load(0, second)
    following = machine.launch(0)
    assert values(found) == [1.0, 1.0]
    assert values(following) == [2.0, 2.0]


def test_a_load_elsewhere_runs_beside_a_running_step() -> None:
    machine, second = Machine(2), pinned(2.0)
    machine.load(0, pinned(1.0))
    assert values(machine.launch(0)) == [1.0, 1.0]
    torch.cuda.synchronize()
    found = machine.launch(0, cycles=20 * LONG)
    machine.load(1, second)
    machine.stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the load has waited for the step"
    assert values(found) == [1.0, 1.0]


def test_a_large_load_holds_up_no_step() -> None:
    """Neither the steps beside it, nor what they themselves copy from the host."""
    machine, large = Machine(9), pinned(2.0, 8 * SIZE)  # half a gigabyte
    machine.load(0, pinned(1.0))
    small = torch.ones(4096).pin_memory()
    place = torch.zeros_like(small, device="cuda")
    ends: list[torch.cuda.Event] = []
    for step in range(40):
        if step == 10:
            machine.load(1, large)
        with machine.transfers.step([Slot(0)]):
            place.copy_(small, non_blocking=True)
            torch.cuda._sleep(10_000_000)  # some 5 ms
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        if step:
            ends[-2].synchronize()
    torch.cuda.synchronize()
    assert machine.transfers.has_arrived(Slot(1))
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(ends)]
    assert max(times) < 1.3 * statistics.median(times)
    assert values(machine.launch(1)) == [2.0, 2.0]


def test_blocks_move_between_a_running_step_and_the_next() -> None:
    machine, double = Machine(4), pinned(9.0, 2 * SIZE)
    for slot in range(4):
        machine.load(slot, pinned(float(slot)))
    found = machine.launch(0, 1, 2, 3, cycles=LONG)
    machine.store.clear(Slot(0))
    machine.store.clear(Slot(2))
    assert machine.load(0, double) == [Slot(1), Slot(3)]
    following = machine.launch(1, 3, 0)
    assert values(found) == [0.0, 1.0, 2.0, 3.0] * 2
    assert values(following) == [1.0, 3.0, 9.0] * 2


def test_host_memory_may_be_dropped_while_it_is_being_copied() -> None:
    machine = Machine(1)
    first = pinned(1.0)
    with torch.cuda.stream(machine.stream):
        torch.cuda._sleep(LONG)
    machine.load(0, first)
    del first
    gc.collect()
    other = pinned(7.0)  # would take the place of what was dropped
    assert values(machine.launch(0)) == [1.0, 1.0]
    assert other[0] == 7.0


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Two slots for six adapters, which are far from each other in what they answer."""
    model = tiny_model(hidden_size=256, intermediate_size=384, num_layers=3, dtype="bfloat16")
    parts = assemble_tiny(
        model.cuda(),
        max_loras=2,
        max_num_seqs=8,
        max_step_tokens=64,
        kv_blocks=128,
        host_cache="256MiB",
    )
    folder: Path = tmp_path_factory.mktemp("adapters")
    paths = {
        f"a{seed}": random_adapter(
            folder / f"a{seed}", parts.worker.layout, rank=(8, 16, 40)[seed % 3], targets=TARGETS,
            seed=seed,
        )
        for seed in range(6)
    }  # fmt: skip
    return LLM.over(parts, {name: str(path) for name, path in paths.items()})


def test_host_copies_stand_in_the_memory_that_was_locked_at_start(tight: LLM) -> None:
    worker = tight._core._worker
    assert isinstance(worker, Worker)
    memory = worker.host_memory
    assert isinstance(memory, PinnedMemory)
    assert memory.num_beside == 0
    for copy in worker._host._copies.values():
        assert isinstance(copy, HostCopy)
        assert copy.block.memory is memory


def test_answers_stay_the_same_while_adapters_take_turns_in_the_slots(tight: LLM) -> None:
    names = [f"a{i % 6}" for i in range(30)]
    prompts = [[(7 * i + 3 * j) % 160 for j in range(5 + i % 4)] for i in range(30)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = [
        tight.generate([prompt], params, adapter=[name])[0].completions[0].token_ids
        for prompt, name in zip(prompts, names, strict=True)
    ]
    evictions = tight.stats().slot_evictions
    for _ in range(3):
        together = tight.generate(prompts, params, adapter=names)
        # In bfloat16 the company decides the kernels' shapes, so a token in a hundred may differ.
        same = [
            mine == other
            for output, tokens in zip(together, alone, strict=True)
            for mine, other in zip(output.completions[0].token_ids, tokens, strict=True)
        ]
        assert sum(same) >= 0.9 * len(same)
    assert tight.stats().slot_evictions > evictions


@pytest.mark.parametrize("locked_by_itself", [False, True])
def test_a_copy_out_of_locked_memory_does_not_hold_up_the_host(locked_by_itself: bool) -> None:
    """In pieces as well, and though torch does not know that the memory is locked."""
    half = SIZE // 2
    memory = PinnedMemory(256 if locked_by_itself else 6 * half * 4)
    block = memory.keep(HostBlock((torch.full((SIZE,), 2.0),)))
    halves = [memory.keep(HostBlock((torch.zeros(half),))) for _ in range(4)]
    del halves[2], halves[0]
    gc.collect()
    larger = memory.keep(HostBlock((torch.arange(SIZE, dtype=torch.float32),)))
    assert len(larger.pieces) == (1 if locked_by_itself else 2)
    machine = Machine(2)
    with torch.cuda.stream(machine.stream):
        torch.cuda._sleep(LONG)
    machine.store.load(Slot(0), block)
    machine.store.load(Slot(1), larger)
    assert not machine.stream.query(), "the host has waited for the copy"
    torch.cuda.synchronize()
    assert torch.equal(machine.part(0).cpu(), block.whole)
    assert torch.equal(machine.part(1).cpu(), larger.whole)
