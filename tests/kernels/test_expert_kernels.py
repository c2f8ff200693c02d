"""Who goes where in a mixture of experts, and the experts' products, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.ops import triton_experts
from loramux.ops.expert_tiles import num_pieces, product_tiles
from loramux.ops.lora_launches import StepLaunches
from loramux.ops.triton_experts import TritonExperts, sort_pairs

SLOTS = 3

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Case:
    """Experts without adapters, and what the router says."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_tokens: int = 9,
        num_experts: int = 5,
        top_k: int = 2,
        hidden: int = 40,
        size: int = 24,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens * num_experts)

        def normal(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return drawn.to(device, dtype)

        self.x = normal(num_tokens, hidden) * hidden**0.5
        self.gate_up, self.down = (
            normal(num_experts, 2 * size, hidden),
            normal(num_experts, hidden, size),
        )
        scores = torch.rand(num_tokens, num_experts, generator=generator).to(device)
        self.weights, self.index = scores.topk(top_k)
        self.table = torch.zeros(3 * num_experts, SLOTS + 1, 4, dtype=torch.int64, device=device)
        self.token_slot = torch.randint(SLOTS + 1, (num_tokens,), generator=generator)
        self.token_slot = self.token_slot.int().to(device)
        self.experts = TritonExperts(StepLaunches(device, 16))

    def run(self, activation: str = "silu", *, lora: bool = False) -> Tensor:
        arena = torch.zeros(16, dtype=self.x.dtype, device=self.x.device)
        return self.experts.run_experts(
            self.x, self.index, self.weights, self.gate_up, self.down, arena, self.table,
            self.token_slot, activation, lora=lora,
        )  # fmt: skip

    def expected(self, activation: str = "silu") -> Tensor:
        x, gate_up, down = self.x.double(), self.gate_up.double(), self.down.double()
        gate, up = torch.einsum("tkoi,ti->tko", gate_up[self.index], x).chunk(2, dim=-1)
        inner = ACTIVATIONS[activation](gate) * up
        y = torch.einsum("tkoi,tki->tko", down[self.index], inner)
        return (y * self.weights[..., None]).sum(1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_base_is_computed_as_torch_does(device: torch.device, activation: str) -> None:
    case = Case(device)
    assert torch.allclose(case.run(activation).double(), case.expected(activation), atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_tokens": 1, "top_k": 1},
        {"num_tokens": 1, "num_experts": 7, "top_k": 6},
        {"num_tokens": 70, "num_experts": 2},  # more rows of an expert than a piece has
        {"num_tokens": 33, "num_experts": 64, "top_k": 8, "hidden": 129, "size": 70},
        {"num_tokens": 150, "num_experts": 2, "top_k": 2, "hidden": 24, "size": 8},
    ],
    ids=str,
)
def test_any_sizes_will_do(device: torch.device, sizes: dict[str, int]) -> None:
    case = Case(device, **sizes)
    assert torch.allclose(case.run().double(), case.expected(), atol=1e-5)


def test_bfloat16_is_as_near_as_its_own_rounding(device: torch.device) -> None:
    case = Case(device, num_tokens=20, dtype=torch.bfloat16)
    got, wanted = case.run().double(), case.expected()
    assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.usefixtures("rows_apart")
def test_rows_keep_every_bit_whatever_slots_there_are(device: torch.device) -> None:
    """The tables are empty, so all rows are the base's, however they are cut and sorted."""
    case = Case(device, num_tokens=40)
    assert torch.equal(case.run(lora=False), case.run(lora=True))


@pytest.mark.usefixtures("rows_apart")
def test_a_row_keeps_every_bit_whatever_the_others_are(device: torch.device) -> None:
    case = Case(device, num_tokens=40)
    before = case.run()
    case.x[1:] = case.x[1:].flip(0)
    case.index[1:] = case.index[1:].flip(0)
    assert torch.equal(case.run()[0], before[0])


def test_nothing_is_waited_for_where_nothing_runs_aside(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is being captured may not wait for one that is not."""
    case = Case(device, num_tokens=2)
    waits: list[StepLaunches] = []
    monkeypatch.setattr(StepLaunches, "join", lambda step: waits.append(step))
    case.run(lora=False)
    assert not waits
    case.run(lora=True)
    assert len(waits) == 2


@pytest.mark.parametrize("lora", [False, True])
def test_many_pairs_are_sorted_as_few_are(
    device: torch.device, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(device, num_tokens=50, num_experts=6)
    counted = case.run(lora=lora)
    monkeypatch.setattr(triton_experts, "_MAX_COUNTED", 0)
    assert torch.equal(case.run(lora=lora), counted)


def test_pairs_are_sorted_by_expert_then_slot_then_place(device: torch.device) -> None:
    index = torch.tensor([[2, 0], [0, 2], [2, 1]], device=device)
    slots = torch.tensor([1, 3, 1], dtype=torch.int32, device=device)
    order, tokens, found = sort_pairs(index, slots, num_columns=4)
    assert order.tolist() == [1, 2, 5, 0, 4, 3]
    assert tokens.tolist() == [0, 1, 2, 0, 2, 1]
    experts, expert_at, expert_left, runs, run_at, run_left = found.tolist()
    assert experts == [0, 0, 1, 2, 2, 2]
    assert expert_at == [0, 1, 0, 0, 1, 2]
    assert expert_left == [2, 1, 1, 3, 2, 1]
    assert runs == [1, 3, 13, 25, 25, 27]  # records of three parts, four columns each
    assert run_at == [0, 0, 0, 0, 1, 0]
    assert run_left == [1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_pieces_never_outnumber_their_room(rows: int) -> None:
    for num_pairs in (1, 8, 63, 512):
        for num_runs in (1, 4, 128):
            counts = torch.randint(num_runs, (num_pairs,)).bincount(minlength=num_runs)
            assert int((-(-counts // rows)).sum()) <= num_pieces(num_pairs, num_runs, rows)


def test_tiles_of_the_base_hang_on_the_size_of_the_step_alone() -> None:
    rows = [product_tiles(pairs, 128, 2).block_rows for pairs in (8, 512, 4096, 65536)]
    assert rows == [16, 16, 32, 128]
