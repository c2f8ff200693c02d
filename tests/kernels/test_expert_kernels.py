"""Who goes where in a mixture of experts, and the experts' products, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loramux.ops import expert_routing, expert_tiles
from loramux.ops.expert_routing import Choice, Runs, route
from loramux.ops.expert_tiles import num_pieces, product_tiles
from loramux.ops.lora_launches import StepLaunches
from loramux.ops.triton_experts import TritonExperts

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
        self.token_count = torch.tensor([num_tokens], dtype=torch.int32, device=device)
        self.experts = TritonExperts(StepLaunches(device, 16))

    def run(self, activation: str = "silu", *, lora: bool = False) -> Tensor:
        arena = torch.zeros(16, dtype=self.x.dtype, device=self.x.device)
        return self.experts.run_experts(
            self.x, self.index, self.weights, self.gate_up, self.down, arena, self.table,
            self.token_slot, self.token_count, activation, lora=lora,
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


@pytest.mark.parametrize("num_tokens", [3, 20, 70])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("most_counted", [0, 8192])
def test_padding_becomes_nothing_and_no_expert_works_for_it(
    device: torch.device,
    num_tokens: int,
    lora: bool,
    most_counted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_routing, "_MAX_COUNTED", most_counted)
    case = Case(device, num_tokens=num_tokens)
    wanted = case.expected()[:2]
    case.token_count.fill_(2)
    used = sorted({*case.index[:2].reshape(-1).tolist()})
    unused = [expert for expert in range(len(case.down)) if expert not in used]
    case.gate_up[unused], case.down[unused], case.x[2:] = torch.nan, torch.nan, torch.nan
    case.index[2:] = 2**40
    result = case.run(lora=lora)
    assert torch.allclose(result[:2].double(), wanted, atol=1e-5)
    assert not result[2:].any()


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
    monkeypatch.setattr(expert_routing, "_MAX_COUNTED", 0)
    assert torch.equal(case.run(lora=lora), counted)


INDEX = [[2, 0], [0, 2], [2, 1], [1, 1]]
"""Of four tokens, of which the last is padding."""


@pytest.mark.parametrize("most_at_once", [0, 128], ids=["two launches", "one"])
@pytest.mark.parametrize("most_counted", [0, 8192], ids=["torch", "counted"])
def test_pairs_are_cut_by_expert_and_by_slot(
    device: torch.device, most_at_once: int, most_counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_tiles, "ALONE_PAIRS", 0)
    monkeypatch.setattr(expert_routing, "_SORTED_AT_ONCE", most_at_once)
    monkeypatch.setattr(expert_routing, "_MAX_COUNTED", most_counted)
    choice = Choice(
        torch.tensor(INDEX, device=device),
        torch.tensor([1, 3, 1, 3], dtype=torch.int32, device=device),
        torch.tensor([3], dtype=torch.int32, device=device),
    )
    routed = route(StepLaunches(device, 16), choice, num_experts=3, expert_rows=2, columns=4)
    assert routed.slots is not None
    assert routed.order[:6].tolist() == [1, 2, 5, 0, 4, 3]
    assert pieces_of(routed.experts) == [(0, 0, 2), (1, 2, 1), (2, 3, 2), (2, 5, 1)]
    assert routed.slots.tokens[:6].tolist() == [0, 1, 2, 0, 2, 1]
    # Records of three parts, four columns each.
    runs = [(1, 0, 1), (3, 1, 1), (13, 2, 1), (25, 3, 2), (27, 5, 1)]
    assert pieces_of(routed.slots.runs) == runs
    places, records = routed.slots.by_pair[:, :6].tolist()
    assert places == [48, 0, 16, 64, 49, 32]
    assert records == [25, 1, 3, 27, 25, 13]


def pieces_of(runs: Runs) -> list[tuple[int, int, int]]:
    """Which, start and rows of those that have any; what is unused must be nothing."""
    pieces = list(zip(runs.slot.tolist(), runs.start.tolist(), runs.rows.tolist(), strict=True))
    assert len(pieces) == runs.grid
    used = [piece for piece in pieces if piece[2]]
    assert pieces == used + [(0, 0, 0)] * (runs.grid - len(used))
    return used


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_pieces_never_outnumber_their_room(rows: int) -> None:
    for num_pairs in (1, 8, 63, 512):
        for num_runs in (1, 4, 128):
            counts = torch.randint(num_runs, (num_pairs,)).bincount(minlength=num_runs)
            assert int((-(-counts // rows)).sum()) <= num_pieces(num_pairs, num_runs, rows)


def test_tiles_of_the_base_hang_on_the_size_of_the_step_alone() -> None:
    rows = [product_tiles(pairs, 128, 2).block_rows for pairs in (8, 512, 4096, 65536)]
    assert rows == [16, 16, 64, 128]
