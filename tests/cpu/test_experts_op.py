"""Experts with LoRA as one call: each row follows the formula, whoever shares the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loramux.adapters.experts import DOWN, GATE, PARTS, UP
from loramux.ops import expert_tiles
from tests.cpu.adapted_experts import (
    EXPERTS,
    HIDDEN,
    MAX_TOKENS,
    RANK,
    SIZE,
    TOKENS,
    Adapter,
    Build,
    ExpertsLayer,
    Rows,
    by_kernels,
    draw,
    draw_rows,
    in_torch,
)
from tests.cpu.adapted_linear import assert_close, bits

BASE = 4
NOTHING = Adapter({})
"""On experts: the adapter has attention alone."""


WAYS = {
    "kernels": {},
    "by pair": {"ALONE_PAIRS": 0},
    "by run": {"ALONE_PAIRS": 0, "PAIRS_PER_EXPERT_OF_FEW": 0, "PAIRS_PER_EXPERT_OF_MANY": 0},
}
"""How kernels go about adding deltas, by what a step's size is compared with."""


@pytest.fixture(params=["torch", "kernels"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Build:
    if request.param == "torch":
        return in_torch
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(expert_tiles, name, value)
    return by_kernels


in_every_way = pytest.mark.parametrize("build", ["torch", *WAYS], indirect=True)


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(bits(got), bits(wanted))


def differ(got: Tensor, other: Tensor) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(got, other, strict=True)]


@in_every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, TOKENS, MAX_TOKENS])
def test_odd_and_even_rows_follow_the_formula(
    build: Build, dtype: torch.dtype, num_tokens: int
) -> None:
    layer = ExpertsLayer(build, dtype=dtype)
    layer.load(0, draw(1))
    layer.load(3, draw(2))
    rows = draw_rows(layer, num_tokens)
    slots = [(0, 3)[i % 2] for i in range(num_tokens)]
    assert_close(layer.run(slots, rows), layer.expected(slots, rows))


@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_one_adapter_in_two_slots_gives_the_bits_of_one(build: Build, dtype: torch.dtype) -> None:
    layer = ExpertsLayer(build, dtype=dtype)
    layer.load(0, draw(1))
    layer.load(1, draw(1))
    rows = draw_rows(layer)
    half = TOKENS // 2
    assert_same_bits(layer.run([0] * half + [1] * half, rows), layer.run([0] * TOKENS, rows))


@pytest.mark.usefixtures("rows_apart")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_keep_every_bit_whoever_shares_the_batch(build: Build, dtype: torch.dtype) -> None:
    layer = ExpertsLayer(build, dtype=dtype)
    for slot, adapter in enumerate((draw(1), draw(2), draw(3, parts=(DOWN,)), NOTHING)):
        layer.load(slot, adapter)
    rows = draw_rows(layer)
    alone = {slot: layer.run([slot] * TOKENS, rows) for slot in range(BASE + 1)}
    for mix in ([0, 1, 2, 3, 4], [4, 4, 0], [2, 2, 2, 3]):
        slots = [mix[i % len(mix)] for i in range(TOKENS)]
        wanted = torch.stack([alone[slot][row] for row, slot in enumerate(slots)])
        assert_same_bits(layer.run(slots, rows), wanted)


@in_every_way
@pytest.mark.usefixtures("rows_apart")
def test_adapters_without_experts_give_the_bits_of_the_base(build: Build) -> None:
    layer = ExpertsLayer(build)
    layer.load(0, NOTHING)
    layer.load(1, draw(1))
    rows = draw_rows(layer)
    base = layer.run([BASE] * TOKENS, rows)
    mixed = layer.run([0, 1, BASE, 0] * (TOKENS // 4), rows)
    assert differ(mixed, base) == [False, True, False, False] * (TOKENS // 4)


@pytest.mark.parametrize(
    "parts",
    [(GATE,), (UP,), (DOWN,), (GATE, UP), (GATE, DOWN), (UP, DOWN)],
    ids=lambda parts: " and ".join(parts),
)
def test_projections_may_be_missing(build: Build, parts: tuple[str, ...]) -> None:
    layer = ExpertsLayer(build)
    layer.load(0, draw(1, parts=parts))
    layer.load(1, draw(2))
    rows, slots = draw_rows(layer), [0, 1] * (TOKENS // 2)
    got = layer.run(slots, rows)
    assert_close(got, layer.expected(slots, rows))
    assert all(differ(got, layer.run([BASE] * TOKENS, rows)))


def test_experts_may_be_missing(build: Build) -> None:
    layer = ExpertsLayer(build)
    layer.load(0, draw(1, experts=(1, 3)))
    rows, slots = draw_rows(layer), [0] * TOKENS
    got = layer.run(slots, rows)
    assert_close(got, layer.expected(slots, rows))
    touched = [bool({1, 3} & set(chosen)) for chosen in rows.index.tolist()]
    assert differ(got, layer.run([BASE] * TOKENS, rows)) == touched
    assert len(set(touched)) == 2, "rows of both kinds are needed to show"


@in_every_way
def test_ranks_may_differ_between_experts_and_projections(build: Build) -> None:
    layer = ExpertsLayer(build)
    ranks = iter([1, 2, 3, 5, 8, 16, 33, 64, 7, 4, 24, 40])
    by_place = {(e, part): next(ranks) for e in range(EXPERTS) for part in PARTS}
    layer.load(0, draw(1, ranks=lambda expert, part: by_place[expert, part]))
    layer.load(1, draw(2, ranks=lambda expert, part: 3))
    rows, slots = draw_rows(layer), [0, 1, 1, BASE] * (TOKENS // 4)
    assert_close(layer.run(slots, rows), layer.expected(slots, rows))


def test_another_adapter_in_the_slot_counts_at_once(build: Build) -> None:
    """Without a change of anything that the call was built with."""
    layer = ExpertsLayer(build)
    layer.load(0, draw(1))
    rows, slots = draw_rows(layer), [0] * TOKENS
    before = layer.run(slots, rows)
    layer.load(0, draw(2, ranks=lambda expert, part: 2 * RANK))
    after = layer.run(slots, rows)
    assert all(differ(after, before))
    assert_close(after, layer.expected(slots, rows))
    layer.load(0, draw(1))
    assert_same_bits(layer.run(slots, rows), before)


def shared_outer(seed: int, *, native: bool) -> Adapter:
    """One A for gate and for up of all experts, one B for down; or as many copies of them."""
    pairs = dict(draw(seed).pairs)
    for (expert, part), (a, b) in pairs.items():
        first_a, first_b = pairs[0, part]
        if part == DOWN:
            b = first_b if native else first_b.clone()
        else:
            a = first_a if native else first_a.clone()
        pairs[expert, part] = a, b
    return Adapter(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_experts_share_gives_the_bits_of_its_copies(build: Build, dtype: torch.dtype) -> None:
    layer = ExpertsLayer(build, dtype=dtype)
    layer.load(0, shared_outer(1, native=True))
    layer.load(1, shared_outer(1, native=False))
    rows, slots = draw_rows(layer), [0] * TOKENS
    got = layer.run(slots, rows)
    assert_same_bits(got, layer.run([1] * TOKENS, rows))
    assert_close(got, layer.expected(slots, rows))
    saved = (EXPERTS - 1) * (2 * RANK * HIDDEN + HIDDEN * RANK) * dtype.itemsize
    assert layer.block_bytes(1) - layer.block_bytes(0) == saved


@in_every_way
def test_magnitudes_scale_the_rows_of_a_projection(build: Build) -> None:
    layer = ExpertsLayer(build)
    plain = draw(1)
    magnitudes = {
        (expert, part): torch.linspace(0.5, 1.5, HIDDEN if part == DOWN else SIZE)
        for expert, part in plain.pairs
        if expert != 2
    }
    layer.load(0, replace(plain, magnitudes=magnitudes))
    layer.load(1, plain)
    rows, slots = draw_rows(layer), [0, 1, BASE, 0] * (TOKENS // 4)
    assert_close(layer.run(slots, rows), layer.expected(slots, rows))


@pytest.mark.parametrize("choice", [[2, 0], [0, 2]], ids=["falling", "rising"])
def test_all_rows_may_choose_the_same_experts(build: Build, choice: list[int]) -> None:
    layer = ExpertsLayer(build)
    layer.load(0, draw(1))
    drawn = draw_rows(layer)
    rows = Rows(drawn.x, torch.tensor([choice] * TOKENS, device=layer.device), drawn.weights)
    slots = [0, BASE] * (TOKENS // 2)
    assert_close(layer.run(slots, rows), layer.expected(slots, rows))


def test_router_weights_multiply_the_adapted_result(build: Build) -> None:
    layer = ExpertsLayer(build)
    layer.load(0, draw(1))
    rows, slots = draw_rows(layer), [0] * TOKENS
    twice = Rows(rows.x, rows.index, 2 * rows.weights)
    assert_same_bits(layer.run(slots, twice), 2 * layer.run(slots, rows))
