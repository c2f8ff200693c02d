"""The sampler against transformers' own logits processors, and what must not change its choice."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
from loramux.worker.drawing import Choice, draw, draw_by_torch, uniform
from loramux.worker.filters import adjust, filtered_weights
from loramux.worker.sampler import Sampled, Sampler, choose, reported_logprobs

VOCAB = 211


class Operations(TorchDispatchMode):
    """Notes each operation that is more than another view of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.launched.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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


def choice_of(logits: Tensor, samples: list[Sample]) -> list[Sampled]:
    return Sampler().launch(logits, samples).result()


def probabilities(logits: Tensor, samples: list[Sample]) -> Tensor:
    weights = filtered_weights(adjust(logits, samples), samples).double()
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


@pytest.mark.parametrize("top_p", [5e-324, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2.0**-53])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 50.0])
def test_top_p_keeps_the_fewest_best_tokens_and_ties(top_p: float, temperature: float) -> None:
    tied = random_logits(6, vocab=500).round()  # few different values
    distinct = random_logits(6, vocab=500)
    one_hot = torch.full((1, 500), -1e9).index_fill(1, torch.tensor([123]), 0.0)
    logits = torch.cat((tied, distinct, one_hot, torch.zeros(1, 500)))
    whole = filtered_weights(logits, [sample(temperature=temperature)] * len(logits)).tolist()
    kept = filtered_weights(logits, [sample(temperature=temperature, top_p=top_p)] * len(logits))
    for row, weights, found in zip(logits.tolist(), whole, kept.tolist(), strict=True):
        best = sorted(zip(row, weights, strict=True), reverse=True)
        sums = accumulate(weight for _, weight in best)
        target = float(sum(weights)) * top_p
        least = next(score for (score, _), s in zip(best, sums, strict=True) if s >= target)
        assert found == [w if s >= least else 0 for s, w in zip(row, weights, strict=True)]


def test_the_best_token_weighs_as_much_as_a_sum_of_all_may() -> None:
    for vocab in (1, 2, 3, 128, 129):
        weights = filtered_weights(torch.zeros(1, vocab), [sample()])
        assert 2**61 < int(weights.sum()) <= 2**62


@pytest.mark.parametrize("best", [0.0, -0.0])
def test_all_tokens_equally_likely_survive_top_p(best: float) -> None:
    logits = torch.zeros(1, 10)
    logits[0, ::2] = -0.0
    logits[0, 0] = best
    found = probabilities(logits, [sample(top_p=0.5, top_k=3)])
    assert (found > 0).all()


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
def test_tiny_temperature_is_greedy_and_never_overflows(temperature: float) -> None:
    logits = random_logits(4) * 1e30
    chosen = choice_of(logits, [sample(temperature=temperature)] * 4)
    assert [c.token_id for c in chosen] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_argmax(dtype: torch.dtype) -> None:
    logits = random_logits(6).to(dtype)
    chosen = choice_of(logits, [sample(temperature=0)] * 6)
    assert [c.token_id for c in chosen] == logits.argmax(-1).tolist()
    assert all(c.logprobs is None and c.error is None for c in chosen)


def test_greedy_honours_penalties_and_forbidden_tokens() -> None:
    logits = torch.tensor([[5.0, 4.9, 1.0], [5.0, 4.9, 1.0]])
    rows = [
        sample((0,), prompt=1, temperature=0, repetition_penalty=2.0),
        sample((2,), prompt=1, temperature=0, forbidden=(0, 1)),
    ]
    assert [c.token_id for c in choice_of(logits, rows)] == [1, 2]


def test_a_bias_is_added_to_the_logits_before_penalties() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5, 0.25]] * 2)
    samples = [
        sample((0, 1), prompt=1, logit_bias={1: 5.0, 2: -0.5}, repetition_penalty=2.0),
        sample((0, 1), prompt=1),
    ]
    adjusted = adjust(logits, samples)
    assert adjusted.tolist() == [[0.5, 1.5, 0.0, 0.25], [1.0, -2.0, 0.5, 0.25]]


def test_biases_choose_tokens_and_leave_likelihoods_alone() -> None:
    logits = random_logits(3)
    plain, never, always = choice_of(
        logits[:1].expand(3, -1),
        [
            sample(temperature=0, logprobs=0),
            sample(temperature=0, logprobs=0, logit_bias={int(logits[0].argmax()): -100.0}),
            sample(temperature=1.0, logprobs=0, logit_bias={17: 100.0}),
        ],
    )
    assert plain.token_id == int(logits[0].argmax()) != never.token_id
    assert never.token_id == int(logits[0].topk(2).indices[1])
    assert always.token_id == 17
    expected = logits[0].log_softmax(-1)
    for chosen in (plain, never, always):
        assert chosen.token_id is not None
        assert chosen.logprobs is not None
        assert chosen.logprobs.logprob == pytest.approx(float(expected[chosen.token_id]), abs=1e-5)


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(1, 4)
    drawn = {
        choice_of(logits, [sample(seed=seed, forbidden=(0, 3))])[0].token_id for seed in range(50)
    }
    assert drawn == {1, 2}


def test_forbidding_a_token_that_the_model_lacks_changes_nothing() -> None:
    logits = random_logits(1)
    [chosen] = choice_of(logits, [sample(temperature=0, forbidden=(VOCAB, VOCAB + 5))])
    assert chosen.token_id == int(logits.argmax())


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -30.0]])
    num_draws = 4000
    samples = [sample(seed=seed, temperature=1.3) for seed in range(num_draws)]
    chosen = choice_of(logits.expand(num_draws, -1), samples)
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
    weights = torch.tensor(
        [[5, 9, 7, 0], [2**60, 2**61, 2**60 - 1, 0], [1, 0, 0, 0], [0, 0, 2**53 - 1, 0]]
    )
    assert draw(weights, [1 - 2.0**-53] * 4).tolist() == [2, 2, 0, 2]


def test_the_smallest_uniform_draws_the_first_token_that_is_left() -> None:
    weights = torch.tensor([[0, 0, 1, 2**61, 0]])
    assert draw(weights, [0.0]).tolist() == [2]


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 1000])
def test_a_draw_inverts_the_distribution_function(vocab: int) -> None:
    rng = random.Random(vocab)
    weights = [rng.choice([0, 1, rng.randrange(2**40)]) for _ in range(vocab)]
    weights[rng.randrange(vocab)] += 1
    uniforms = [i / 200 for i in range(200)]
    drawn = draw(torch.tensor([weights] * 200), uniforms).tolist()
    reached = list(accumulate(weights))
    assert drawn == [bisect_right(reached, int(u * reached[-1])) for u in uniforms]


def mixed_batch() -> list[Sample]:
    """Every kind of row, so many that they are not all worked on at once."""
    rows = [sample((4, 5, 6, 7), prompt=2, seed=i, **params) for i, params in enumerate(FILTERS)]
    rows += [sample(temperature=0), sample(temperature=0, forbidden=(1,)), sample(seed=-1)]
    rows += [sample(temperature=0, logprobs=3), sample(logprobs=0, presence_penalty=1.0)]
    rows += [sample(logit_bias={3: 2.0, 9: -100.0}), sample(temperature=0, logit_bias={5: 50.0})]
    return [row._replace(seed=row.seed + i) for i, row in enumerate(rows * 5)]


def test_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    rng = random.Random(0)
    rows = mixed_batch()
    logits = random_logits(len(rows))
    together = choice_of(logits, rows)
    for _ in range(5):
        order = rng.sample(range(len(rows)), rng.randint(1, len(rows)))
        assert choice_of(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_a_draw_depends_on_the_place_in_the_output_and_not_in_the_context() -> None:
    logits = random_logits(20)
    short = [sample((1, 50, 60), prompt=1, seed=i) for i in range(20)]
    long = [sample((1, 2, 3, 4, 50, 60), prompt=4, seed=i) for i in range(20)]
    assert choice_of(logits, short) == choice_of(logits, long)


def test_the_work_on_the_device_needs_no_value_from_it() -> None:
    """Meta tensors have no values: whatever would wait for one, or for a size, raises."""
    rows = mixed_batch()
    logits = torch.empty(len(rows), VOCAB, dtype=torch.bfloat16, device="meta")
    choice = choose(logits, rows)
    logprobs = reported_logprobs(logits, choice.token_ids, rows)
    assert logprobs is not None
    for tensor in (*choice, *logprobs):
        assert tensor.is_meta
    assert choice.token_ids.shape == (len(rows),)
    assert logprobs.best.shape == (10, 3)


def test_the_next_step_can_have_the_tokens_at_once() -> None:
    rows = mixed_batch()
    sampling = Sampler().launch(random_logits(len(rows)), rows)
    assert sampling.token_ids.dtype == torch.int64
    assert sampling.token_ids.tolist() == [c.token_id for c in sampling.result()]


def test_a_greedy_batch_launches_an_argmax_and_hardly_more() -> None:
    logits = random_logits(4).bfloat16()
    with Operations() as operations:
        choose(logits, [sample(temperature=0)] * 4)
    assert operations.launched == ["argmax", "gather", "_to_copy"]


def test_a_batch_without_rows_has_no_tokens() -> None:
    assert choice_of(torch.zeros(0, VOCAB), []) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, *FILTERS], ids=str)
def test_a_row_that_is_not_sound_still_names_a_token(bad: float, params: dict[str, Any]) -> None:
    """The next step may look its embedding up before the host knows."""
    logits = random_logits(3)
    logits[1] = bad
    logits[2, 9] = bad
    sampling = Sampler().launch(logits, [sample(**params)] * 3)
    assert ((sampling.token_ids >= 0) & (sampling.token_ids < VOCAB)).all()


def test_forbidding_the_token_that_is_not_finite_makes_no_row_sound() -> None:
    logits = random_logits(2)
    logits[0, 17] = float("nan")
    rows = [sample(forbidden=(17,)), sample(temperature=0, forbidden=(17,))]
    sick, sound = choice_of(logits, rows)
    assert "nan" in str(sick.error)
    assert sound.error is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.9}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    logits = random_logits(3)
    sound = choice_of(logits, [sample(logprobs=1, **params)] * 3)
    logits[1, 17] = bad
    chosen = choice_of(logits, [sample(logprobs=1, **params)] * 3)
    assert chosen[1].token_id is None
    assert chosen[1].logprobs is None
    assert "not finite" in str(chosen[1].error)
    assert [chosen[0], chosen[2]] == [sound[0], sound[2]]


def test_a_row_of_minus_infinity_fails() -> None:
    [chosen] = choice_of(torch.full((1, 4), -torch.inf), [sample()])
    assert chosen.token_id is None
    assert chosen.error


def test_a_row_without_an_allowed_token_fails() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    [chosen] = choice_of(logits, [sample(forbidden=(0, 2))])
    assert chosen.token_id is None
    assert chosen.error


def test_some_logits_at_minus_infinity_are_ordinary() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    for params in ({"temperature": 0}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1}):
        assert choice_of(logits, [sample(**params)])[0].token_id == 1


def test_reported_logprobs_are_those_before_penalties_and_filters() -> None:
    logits = random_logits(2)
    rows = [sample((0, 1, 2), temperature=0.3, top_k=1, repetition_penalty=5.0, logprobs=3)] * 2
    raw = logits.log_softmax(-1)
    for i, chosen in enumerate(choice_of(logits, rows)):
        assert chosen.logprobs is not None
        assert chosen.logprobs.token_id == chosen.token_id
        assert chosen.logprobs.logprob == raw[i, chosen.token_id].item()
        best = raw[i].topk(3)
        assert chosen.logprobs.top == tuple(
            zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )


def test_each_row_reports_as_many_alternatives_as_it_asked_for() -> None:
    rows = [sample(logprobs=0), sample(), sample(logprobs=20), sample(temperature=0, logprobs=2)]
    found = [c.logprobs for c in choice_of(random_logits(4), rows)]
    assert [None if f is None else len(f.top) for f in found] == [0, None, 20, 2]


def test_a_vocabulary_smaller_than_the_alternatives_is_reported_whole() -> None:
    [chosen] = choice_of(torch.zeros(1, 3), [sample(logprobs=20)])
    assert chosen.logprobs is not None
    assert len(chosen.logprobs.top) == 3


def test_a_way_to_draw_that_is_wrong_or_fails_is_given_up_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wrong(scores: Tensor, choice: Choice, drawn: Mapping[int, Sample]) -> None:
        draw_by_torch(scores, choice, drawn)
        for row, sample in drawn.items():
            if sample.params.top_p < 1.0:
                choice.token_ids[row] = 0

    def broken(scores: Tensor, choice: Choice, drawn: Mapping[int, Sample]) -> None:
        raise RuntimeError("no such instruction")

    rows = mixed_batch()
    logits = random_logits(len(rows), vocab=500)
    expected = [chosen.token_id for chosen in Sampler().launch(logits, rows).result()]
    for unfit in (wrong, broken):
        sampler = Sampler(unfit)
        sampler.warm_up(500, logits.dtype, logits.device)
        assert [chosen.token_id for chosen in sampler.launch(logits, rows).result()] == expected
    assert caplog.text.count("torch draws") == 2
    assert "no such instruction" in caplog.text


def test_a_way_to_draw_that_is_right_is_kept_at_start() -> None:
    asked: list[int] = []

    def counted(scores: Tensor, choice: Choice, drawn: Mapping[int, Sample]) -> None:
        asked.append(len(drawn))
        draw_by_torch(scores, choice, drawn)

    sampler = Sampler(counted)
    sampler.warm_up(500, torch.float32, torch.device("cpu"))
    asked.clear()
    rows = mixed_batch()
    sampler.launch(random_logits(len(rows), vocab=500), rows).result()
    assert sum(asked) > 0
