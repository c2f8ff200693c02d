"""The sampling kernel chooses the very tokens that torch's operations choose, whatever the row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from loramux.ops import triton_sampling
from loramux.ops.sampling_kernel import BLOCK, ROOM
from loramux.ops.triton_sampling import draw_tokens
from loramux.plan import Sample
from loramux.worker.drawing import draw, draw_by_triton, uniform
from loramux.worker.filters import filtered_weights, rate_of, weight_unit
from loramux.worker.sampler import Sampler, choose
from tests.cpu.test_sampler import random_logits, sample

SizesOf = Callable[[int, int], None]

FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 200, "temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.99, "temperature": 40.0},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 30.0, "top_k": 250, "top_p": 0.7},
    {"temperature": 0},
]

HARD: list[dict[str, Any]] = [
    {"temperature": 1e-320},
    {"temperature": 100.0, "top_p": 1 - 2.0**-53},
    {"top_k": 1, "min_p": 1.0},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 299},
    {"top_p": 5e-324},
]
"""Filters at the ends of what they may be, for rows of 300."""


def _rows() -> dict[str, Tensor]:
    one_finite = torch.full((300,), -torch.inf)
    one_finite[271] = -5.0
    half = random_logits(1, seed=3, vocab=300)[0]
    zeros = torch.zeros(300)
    zeros[::2] = -0.0
    return {
        "all equal": torch.full((300,), 2.5),
        "zeros of both signs": zeros,
        "tied at every threshold": random_logits(1, vocab=300)[0].round(),
        "one finite": one_finite,
        "half at -inf": half.masked_fill(half < 0, -torch.inf),
        "far apart": random_logits(1, vocab=300)[0] * 1e30,
        "as far apart as floats are": torch.linspace(-3.4, 3.4, 300) * 1e38,
        "closer than floats tell from one": 1 + torch.arange(300) * 2.0**-23,
        "rising": torch.arange(300) / 10,
        "best ones in one group": torch.arange(300).remainder(64).eq(5) * 9 + zeros,
    }


ROWS = _rows()
# Few sizes, since on a GPU each vocabulary, block, room and dtype is a compilation of seconds.


@pytest.fixture
def sizes_of(monkeypatch: pytest.MonkeyPatch) -> SizesOf:
    """Sets the kernel's block and room, so that a short row is to it what a long one is."""

    def set_sizes(block: int, room: int) -> None:
        small = partial(draw_tokens, block=block, room=room)
        monkeypatch.setattr(triton_sampling, "draw_tokens", small)

    return set_sizes


def seeded(params: list[dict[str, Any]], start: int = 0, **more: Any) -> list[Sample]:
    return [sample(seed=start + i, **more, **p) for i, p in enumerate(params)]


def assert_chosen_as_by_torch(logits: Tensor, samples: list[Sample], device: torch.device) -> None:
    expected = choose(logits, samples)
    found = choose(logits.to(device), samples, draw_by_triton)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.best.tolist() == expected.best.tolist()


@pytest.mark.parametrize(
    ("vocab", "block", "room"),
    [(1, 64, 32), (7, 64, 32), (300, 64, 32), (5000, 1024, 64), (5000, BLOCK, ROOM)],
)
def test_draws_are_those_of_torch(
    device: torch.device, sizes_of: SizesOf, vocab: int, block: int, room: int
) -> None:
    sizes_of(block, room)
    logits = random_logits(len(FILTERS), seed=vocab, vocab=vocab)
    if block != BLOCK:
        logits = logits.bfloat16()  # with ties
    assert_chosen_as_by_torch(logits, seeded(FILTERS, start=vocab), device)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_hostile_rows_are_drawn_from_as_by_torch(
    device: torch.device, sizes_of: SizesOf, row: str
) -> None:
    sizes_of(64, 32)
    logits = ROWS[row].expand(len(HARD), -1)
    assert_chosen_as_by_torch(logits, seeded(HARD, start=len(row)), device)


@pytest.mark.parametrize(
    ("params", "room"),
    [({}, 16), ({"top_k": 9}, 16), ({"top_p": 0.8}, 16), ({"top_p": 0.99, "min_p": 0.01}, 2)],
)
def test_draws_invert_the_distribution_function(
    device: torch.device, params: dict[str, Any], room: int
) -> None:
    """From the smallest random number to the largest one, and at each step between two tokens."""
    vocab, one = 40, sample(**params)
    logits = random_logits(1, seed=1, vocab=vocab)
    weights = filtered_weights(logits, [one])
    total = float(weights.sum())
    steps = [float(s) / total for s in weights.cumsum(-1)[0].unique()[::4]]
    near = [near for s in steps for near in (s - 1e-9, s + 1e-9) if 0 <= near < 1]
    uniforms = [0.0, *near, 1 - 2.0**-53]
    top_k, least = one.params.top_k, one.params.min_p * weight_unit(vocab)
    draws = [[0, rate_of(1.0), top_k, one.params.top_p, least, u] for u in uniforms]
    rows = torch.arange(len(draws), dtype=torch.float64)
    table = torch.tensor(draws, dtype=torch.float64)
    table[:, 0] = rows
    scores = logits.expand(len(draws), -1).contiguous()
    found = torch.full((len(draws),), -1, device=device)
    best = scores.amax(-1).to(device)
    unit = weight_unit(vocab)
    draw_tokens(scores.to(device), best, table.to(device), found, unit=unit, block=16, room=room)
    assert found.tolist() == draw(weights.expand(len(draws), -1), uniforms).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_sound_fail_alone_and_still_name_a_token(
    device: torch.device, sizes_of: SizesOf, bad: float
) -> None:
    sizes_of(64, 32)
    samples = seeded([{"top_p": 0.9}, {"top_k": 3}, {}])
    logits = random_logits(3, vocab=300)
    sound = Sampler().launch(logits, samples).result()
    logits[1] = -math.inf
    logits[1, 17] = bad
    sampling = Sampler(draw_by_triton).launch(logits.to(device), samples)
    assert 0 <= int(sampling.token_ids[1]) < 300
    chosen = sampling.result()
    assert chosen[1].token_id is None
    assert "not finite" in str(chosen[1].error)
    assert [chosen[0], chosen[2]] == [sound[0], sound[2]]


def test_a_draw_does_not_depend_on_the_rest_of_the_batch(
    device: torch.device, sizes_of: SizesOf
) -> None:
    sizes_of(64, 32)
    samples = seeded(FILTERS)
    logits = random_logits(len(samples), vocab=300).to(device)
    together = choose(logits, samples, draw_by_triton).token_ids.tolist()
    order = [7, 3, 9, 0]
    fewer = choose(logits[order], [samples[i] for i in order], draw_by_triton)
    assert fewer.token_ids.tolist() == [together[i] for i in order]


def test_penalised_rows_and_others_are_drawn_in_one_batch(
    device: torch.device, sizes_of: SizesOf
) -> None:
    sizes_of(64, 32)
    samples = seeded(FILTERS[:6])
    samples[1::2] = seeded(
        FILTERS[1:6:2], tokens=(4, 5, 5, 6), prompt=1, forbidden=(0, 8),
        repetition_penalty=1.5, frequency_penalty=0.5,
    )  # fmt: skip
    assert_chosen_as_by_torch(random_logits(6, vocab=300), samples, device)


def test_rows_with_a_guide_and_others_are_drawn_in_one_batch(
    device: torch.device, sizes_of: SizesOf
) -> None:
    sizes_of(64, 32)
    samples = seeded(FILTERS)
    for i in range(0, len(samples), 2):
        mask = 1 << (7 * i) | 1 << 130 | 1 << 131 | 1 << (290 - i)
        samples[i] = samples[i]._replace(allowed=mask.to_bytes(38, "little"))
    assert_chosen_as_by_torch(random_logits(len(samples), vocab=300), samples, device)


def test_rows_may_stand_apart_in_memory(device: torch.device, sizes_of: SizesOf) -> None:
    sizes_of(64, 32)
    logits = random_logits(4, vocab=300)
    samples = seeded(FILTERS[:4])
    wide = torch.full((4, 301), 1e9)
    wide[:, :300] = logits
    found = choose(wide.to(device)[:, :300], samples, draw_by_triton)
    assert found.token_ids.tolist() == choose(logits, samples).token_ids.tolist()


def test_tokens_tied_for_the_best_are_drawn_evenly_though_they_just_fit(
    device: torch.device, sizes_of: SizesOf
) -> None:
    sizes_of(16, 16)
    tied = [2 * i + i // 8 for i in range(16)]
    row = torch.full((40,), -1.0)
    row[tied] = torch.tensor([-0.0, 0.0]).repeat(8)
    samples = [sample(seed=seed, top_k=2, top_p=0.3) for seed in range(24)]
    found = choose(row.expand(24, -1).to(device), samples, draw_by_triton).token_ids.tolist()
    assert found == [tied[int(16 * uniform(s.seed, s.position))] for s in samples]
    assert {tied[0], tied[-1]} <= {*found}


def test_a_position_further_on_draws_anew(device: torch.device, sizes_of: SizesOf) -> None:
    sizes_of(16, 16)
    samples = [sample()._replace(position=i) for i in range(8)]
    found = choose(torch.zeros(8, 40).to(device), samples, draw_by_triton)
    assert len(set(found.token_ids.tolist())) > 4
