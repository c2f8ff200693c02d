"""The sampler against transformers' own logits processors, and what must not change its choice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loramux.plan import Sample
from loramux.types import SamplingParams
from loramux.worker.filters import adjust, filtered_weights
from loramux.worker.sampler import Sampler, _draw, uniform

VOCAB = 211


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample(
    tokens: tuple[int, ...] = (1, 2, 3),
    *,
    prompt: int = 3,
    seed: int = 7,
    forbidden: tuple[int, ...] = (),
    **params: Any,
) -> Sample:
    return Sample(SamplingParams(**params), seed, tokens, prompt, len(tokens) - prompt, forbidden)


def probabilities(logits: Tensor, samples: list[Sample]) -> Tensor:
    weights = filtered_weights(adjust(logits, samples), samples)
    return (weights / weights.sum(-1, keepdim=True)).float()


def transformers_probabilities(row: Tensor, s: Sample) -> Tensor:
    p = s.params
    steps: list[Any] = []
    if p.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    steps.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k > 0:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        steps.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        steps.append(MinPLogitsWarper(p.min_p))
    ids = torch.tensor([list(s.tokens)])
    return LogitsProcessorList(steps)(ids, row[None].clone())[0].softmax(-1)


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 0.99999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filtered_distribution_equals_transformers(params: dict[str, Any]) -> None:
    tokens = (5, 9, 9, 100, 17)
    logits = random_logits(8)
    samples = [sample(tokens, prompt=2, **params)] * 8
    expected = torch.stack([transformers_probabilities(row, samples[0]) for row in logits])
    found = probabilities(logits, samples)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_rows_with_different_filters_do_not_touch_each_other() -> None:
    samples = [sample((4, 5, 6, 7), prompt=2, **params) for params in FILTERS]
    logits = random_logits(len(samples))
    together = filtered_weights(adjust(logits, samples), samples)
    for i, alone in enumerate(samples):
        row = logits[i : i + 1]
        assert torch.equal(together[i], filtered_weights(adjust(row, [alone]), [alone])[0])


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = random_logits(1)
    s = sample((3, 3, 8, 8, 8, 9), prompt=2, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[0, 8] -= 0.5 + 3 * 0.25
    expected[0, 9] -= 0.5 + 0.25
    torch.testing.assert_close(adjust(logits, [s]), expected)


def test_penalties_before_any_output_leave_the_logits_alone() -> None:
    logits = random_logits(1)
    s = sample(presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(adjust(logits, [s]), logits)


def test_adjusting_keeps_the_given_logits() -> None:
    logits = random_logits(1)
    before = logits.clone()
    adjust(logits, [sample(repetition_penalty=2.0, forbidden=(0,))])
    assert torch.equal(logits, before)


def test_top_k_keeps_ties_as_transformers_does() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    found = probabilities(logits, [sample(top_k=2)])
    assert (found > 0).tolist() == [[False, True, True, True, False]]


def test_all_tokens_equally_likely_survive_top_p() -> None:
    found = probabilities(torch.zeros(1, 10), [sample(top_p=0.5)])
    assert (found > 0).all()


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_tiny_temperature_is_greedy_and_never_overflows(temperature: float) -> None:
    logits = random_logits(4) * 1e30
    chosen = Sampler()(logits, [sample(temperature=temperature)] * 4)
    assert [c.token_id for c in chosen] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_argmax(dtype: torch.dtype) -> None:
    logits = random_logits(6).to(dtype)
    chosen = Sampler()(logits, [sample(temperature=0)] * 6)
    assert [c.token_id for c in chosen] == logits.argmax(-1).tolist()
    assert all(c.logprobs is None and c.error is None for c in chosen)


def test_greedy_honours_penalties_and_forbidden_tokens() -> None:
    logits = torch.tensor([[5.0, 4.9, 1.0], [5.0, 4.9, 1.0]])
    rows = [
        sample((0,), prompt=1, temperature=0, repetition_penalty=2.0),
        sample((2,), prompt=1, temperature=0, forbidden=(0, 1)),
    ]
    assert [c.token_id for c in Sampler()(logits, rows)] == [1, 2]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(1, 4)
    drawn = {
        Sampler()(logits, [sample(seed=seed, forbidden=(0, 3))])[0].token_id for seed in range(50)
    }
    assert drawn == {1, 2}


def test_forbidding_a_token_that_the_model_lacks_changes_nothing() -> None:
    logits = random_logits(1)
    [chosen] = Sampler()(logits, [sample(temperature=0, forbidden=(VOCAB, VOCAB + 5))])
    assert chosen.token_id == int(logits.argmax())


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -30.0]])
    num_draws = 4000
    samples = [sample(seed=seed, temperature=1.3) for seed in range(num_draws)]
    chosen = Sampler()(logits.expand(num_draws, -1), samples)
    counts = Counter(c.token_id for c in chosen)
    expected = (logits[0] / 1.3).softmax(-1) * num_draws
    chi_square = sum((counts[i] - float(e)) ** 2 / float(e) for i, e in enumerate(expected[:5]))
    assert chi_square < 18.5  # 4 degrees of freedom: one in a thousand
    assert counts[5] == 0


def test_draws_of_one_seed_differ_along_the_output() -> None:
    positions = [uniform(3, position) for position in range(4000)]
    assert len(set(positions)) == 4000
    assert abs(sum(positions) / 4000 - 0.5) < 0.02
    assert all(0 <= u < 1 for u in positions)


def test_uniforms_never_change() -> None:
    """A change here breaks every seed that a user has written down."""
    found = [uniform(0, 0), uniform(1, 0), uniform(-1, 5)]
    assert found == [0.0564663990004608, 0.6487508310490744, 0.9318107580365629]


def test_seeds_are_taken_modulo_64_bits() -> None:
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_the_largest_uniform_draws_the_last_token_that_is_left() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]]).double()
    assert _draw(weights, [1 - 2.0**-53] * 2) == [2, 0]


def test_the_smallest_uniform_draws_the_first_token_that_is_left() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.3, 1.0, 0.0]]).double()
    assert _draw(weights, [0.0]) == [2]


def test_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    rng = random.Random(0)
    rows = [sample((4, 5, 6, 7), prompt=2, seed=i, **params) for i, params in enumerate(FILTERS)]
    rows += [sample(temperature=0), sample(temperature=0, forbidden=(1,)), sample(seed=-1)]
    logits = random_logits(len(rows))
    together = Sampler()(logits, rows)
    for _ in range(5):
        order = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
        assert Sampler()(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_a_draw_depends_on_the_place_in_the_output_and_not_in_the_context() -> None:
    logits = random_logits(20)
    short = [sample((1, 50, 60), prompt=1, seed=i) for i in range(20)]
    long = [sample((1, 2, 3, 4, 50, 60), prompt=4, seed=i) for i in range(20)]
    assert Sampler()(logits, short) == Sampler()(logits, long)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.9}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    sound = Sampler()(logits, [sample(logprobs=1, **params)] * 3)
    logits[1, 17] = bad
    chosen = Sampler()(logits, [sample(logprobs=1, **params)] * 3)
    assert chosen[1].token_id is None
    assert chosen[1].logprobs is None
    assert "not finite" in str(chosen[1].error)
    assert [chosen[0], chosen[2]] == [sound[0], sound[2]]


def test_a_row_of_minus_infinity_fails() -> None:
    [chosen] = Sampler()(torch.full((1, 4), -torch.inf), [sample()])
    assert chosen.token_id is None
    assert chosen.error


def test_a_row_without_an_allowed_token_fails() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    [chosen] = Sampler()(logits, [sample(forbidden=(0, 2))])
    assert chosen.token_id is None
    assert chosen.error


def test_some_logits_at_minus_infinity_are_ordinary() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    for params in ({"temperature": 0}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1}):
        assert Sampler()(logits, [sample(**params)])[0].token_id == 1


def test_reported_logprobs_are_those_before_penalties_and_filters() -> None:
    logits = random_logits(2)
    rows = [sample((0, 1, 2), temperature=0.3, top_k=1, repetition_penalty=5.0, logprobs=3)] * 2
    raw = logits.log_softmax(-1)
    for i, chosen in enumerate(Sampler()(logits, rows)):
        assert chosen.logprobs is not None
        assert chosen.logprobs.token_id == chosen.token_id
        assert chosen.logprobs.logprob == raw[i, chosen.token_id].item()
        best = raw[i].topk(3)
        assert chosen.logprobs.top == tuple(
            zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )


def test_each_row_reports_as_many_alternatives_as_it_asked_for() -> None:
    rows = [sample(logprobs=0), sample(), sample(logprobs=20), sample(temperature=0, logprobs=2)]
    found = [c.logprobs for c in Sampler()(random_logits(4), rows)]
    assert [None if f is None else len(f.top) for f in found] == [0, None, 20, 2]


def test_a_vocabulary_smaller_than_the_alternatives_is_reported_whole() -> None:
    [chosen] = Sampler()(torch.zeros(1, 3), [sample(logprobs=20)])
    assert chosen.logprobs is not None
    assert len(chosen.logprobs.top) == 3
