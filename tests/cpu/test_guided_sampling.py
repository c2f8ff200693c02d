"""What a guide's mask does to the choice of a token, and to no other row's."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from loramux.plan import Sample
from loramux.worker import vocabularies
from loramux.worker.filters import adjust
from loramux.worker.sampler import Sampler, choose
from tests.cpu.test_sampler import FILTERS, VOCAB, choice_of, mixed_batch, random_logits, sample


def mask_of(*tokens: int) -> bytes:
    mask = sum(1 << token for token in tokens)
    return mask.to_bytes(mask.bit_length() // 8 + 1, "little")


def guided(*tokens: int, **params: Any) -> Sample:
    return sample((4, 5, 6, 7), prompt=2, **params)._replace(allowed=mask_of(*tokens))


def guided_batch() -> list[Sample]:
    """More rows than are worked on at once, each with its own tokens."""
    draw = random.Random(1)
    return [
        guided(*draw.sample(range(VOCAB), draw.randint(1, 60)), seed=i, **params)
        for i, params in enumerate([*FILTERS, {"temperature": 0}, {"presence_penalty": 1.5}] * 5)
    ]


def tokens_of(row: Sample) -> list[int]:
    assert row.allowed is not None
    mask = int.from_bytes(row.allowed, "little")
    return [token for token in range(VOCAB) if mask >> token & 1]


@pytest.mark.parametrize("tokens", [(0,), (7,), (8,), (VOCAB - 1,), (3, 9, 200), range(VOCAB)])
def test_the_best_allowed_token_is_chosen(tokens: Any) -> None:
    logits = random_logits(5)
    chosen = [c.token_id for c in choice_of(logits, [guided(*tokens, temperature=0)] * 5)]
    allowed = list(tokens)
    assert chosen == [allowed[i] for i in logits[:, allowed].argmax(-1).tolist()]


def test_only_allowed_tokens_are_drawn() -> None:
    rows = guided_batch()
    chosen = choice_of(random_logits(len(rows)), rows)
    assert all(c.token_id in tokens_of(row) for c, row in zip(chosen, rows, strict=True))


def test_a_mask_leaves_the_scores_of_what_it_allows_alone() -> None:
    logits = random_logits(3)
    rows = [guided(1, 4, 5, 9, temperature=0), sample(), guided(VOCAB - 1, presence_penalty=1.0)]
    plain = [row._replace(allowed=None) for row in rows]
    found, expected = adjust(logits, rows), adjust(logits, plain)
    for i, row in enumerate(rows):
        allowed = list(range(VOCAB)) if row.allowed is None else tokens_of(row)
        others = sorted(set(range(VOCAB)) - set(allowed))
        assert torch.equal(found[i, allowed], expected[i, allowed])
        assert torch.isneginf(found[i, others]).all()


def test_penalties_act_among_the_allowed_tokens() -> None:
    logits = torch.tensor([[9.0, 5.0, 4.9, 1.0]])
    row = sample((1,), prompt=1, temperature=0, repetition_penalty=2.0)
    [chosen] = choice_of(logits, [row._replace(allowed=mask_of(1, 2))])
    assert chosen.token_id == 2


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    """As where a model has more logits than its tokenizer has tokens."""
    logits = random_logits(1)
    logits[0, 100:] += 100
    [chosen] = choice_of(logits, [guided(3, 99, temperature=0)])
    assert chosen.token_id == max((3, 99), key=lambda token: float(logits[0, token]))


def test_a_mask_longer_than_the_logits_is_cut() -> None:
    logits = random_logits(1, vocab=13)
    [chosen] = choice_of(logits, [guided(2, 13, 14, 300, temperature=0)])
    assert chosen.token_id == 2


def test_the_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    draw = random.Random(0)
    rows = [*guided_batch(), *mixed_batch()]
    draw.shuffle(rows)
    logits = random_logits(len(rows))
    together = choice_of(logits, rows)
    for size in (1, 2, 17, len(rows)):
        order = draw.sample(range(len(rows)), size)
        assert choice_of(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_rows_without_a_guide_keep_every_bit() -> None:
    plain = mixed_batch()
    others = guided_batch()
    logits = random_logits(len(plain) + len(others))
    alone = choice_of(logits[: len(plain)], plain)
    beside = choice_of(logits, [*plain, *others])
    assert beside[: len(plain)] == alone


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = random_logits(1)
    [chosen] = choice_of(logits, [guided(5, temperature=0, logprobs=2)])
    assert chosen.logprobs is not None
    expected = logits[0].log_softmax(-1)
    assert chosen.logprobs.token_id == 5
    assert chosen.logprobs.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert [token for token, _ in chosen.logprobs.top] == expected.topk(2).indices.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_mask_makes_no_row_sound(bad: float) -> None:
    logits = random_logits(2)
    logits[0, 17] = bad
    sick, sound = choice_of(logits, [guided(3, 4), guided(3, 4)])
    assert sick.error is not None
    assert sound.token_id in (3, 4)


def test_a_row_without_any_token_fails_alone() -> None:
    empty = sample()._replace(allowed=b"\x00")
    sick, sound = choice_of(random_logits(2), [empty, guided(3)])
    assert (sick.token_id, sound.token_id) == (None, 3)
    assert sick.error


def test_vocabularies_of_several_sizes_have_their_own_masks() -> None:
    logits = random_logits(3)
    logits[:, 100:] += 50
    rows = [guided(5, 150, temperature=0), guided(5, 150, temperature=0), sample(temperature=0)]
    found = vocabularies.launch(Sampler(), logits, rows, [100, VOCAB, 100]).result()
    assert [c.token_id for c in found] == [5, 150, int(logits[2, :100].argmax())]


def test_the_work_on_the_device_needs_no_value_from_it() -> None:
    rows = [*guided_batch(), *mixed_batch()]
    logits = torch.empty(len(rows), VOCAB, dtype=torch.bfloat16, device="meta")
    assert choose(logits, rows).token_ids.is_meta


def test_a_mask_of_all_tokens_changes_no_draw() -> None:
    logits = random_logits(len(FILTERS))
    plain = [sample((4, 5), prompt=1, seed=i, **params) for i, params in enumerate(FILTERS)]
    rows = [row._replace(allowed=mask_of(*range(VOCAB))) for row in plain]
    assert choice_of(logits, rows) == choice_of(logits, plain)
