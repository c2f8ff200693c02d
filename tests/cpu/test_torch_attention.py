"""Paged attention against a naive one in float64 that keeps every sequence's keys in a list."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from loramux.ops.attention import AttentionLayer, AttentionParams, AttentionSequence, KvShape
from loramux.ops.torch_attention import TorchAttention

BLOCK = 16
NUM_BLOCKS = 64
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Heads:
    query: int = 4
    kv: int = 2
    key_dim: int = 8
    value_dim: int = 8

    @property
    def shape(self) -> KvShape:
        return KvShape(self.kv, self.key_dim, self.value_dim)


@dataclass
class Conversation:
    """One sequence: its blocks, scattered over the cache, and all that it has seen."""

    seed: int
    block_table: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    length: int = field(default=0)


class Case:
    """A backend of one layer, and sequences whose tokens are known in advance."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        heads: Heads | None = None,
        params: AttentionParams | None = None,
    ) -> None:
        self.dtype, self.heads = dtype, heads or Heads()
        self.params = params or AttentionParams(scale=self.heads.key_dim**-0.5)
        layer = AttentionLayer(self.heads.query, self.heads.shape, self.params)
        self.backend = TorchAttention({0: layer}, NUM_BLOCKS, BLOCK, dtype)
        self._free = list(range(NUM_BLOCKS))
        random.Random(1).shuffle(self._free)

    def sequence(self, length: int, seed: int) -> Conversation:
        generator = torch.Generator().manual_seed(seed)

        def draw(num_heads: int, dim: int) -> Tensor:
            return torch.randn(length, num_heads, dim, generator=generator).to(self.dtype)

        h = self.heads
        table = [self._free.pop() for _ in range(-(-length // BLOCK))]
        q, k, v = draw(h.query, h.key_dim), draw(h.kv, h.key_dim), draw(h.kv, h.value_dim)
        return Conversation(seed, table, q, k, v)

    def step(self, *parts: tuple[Conversation, int]) -> list[Tensor]:
        """Let each sequence go on by some tokens; their answers ``[tokens, heads, dim]``."""
        described, spans, row = [], [], 0
        for s, count in parts:
            described.append(AttentionSequence(row, count, s.length, s.block_table))
            spans.append(slice(s.length, s.length + count))
            row += count
        q, k, v = (
            torch.cat([getattr(s, n)[span] for (s, _), span in zip(parts, spans, strict=True)])
            for n in "qkv"
        )
        self.backend.begin_step(described)
        out = self.backend.layer(0)(q, k, v)
        for s, count in parts:
            s.length += count
        return list(out.split([count for _, count in parts]))

    def expected(self, s: Conversation) -> Tensor:
        """Answers to all tokens so far."""
        p, group = self.params, self.heads.query // self.heads.kv
        out = torch.zeros(s.length, self.heads.query, self.heads.value_dim, dtype=torch.float64)
        for t in range(s.length):
            first = 0 if p.window is None else max(0, t - p.window + 1)
            for head in range(self.heads.query):
                keys = s.k[first : t + 1, head // group].double()
                scores = keys @ s.q[t, head].double() * p.scale
                if p.softcap is not None:
                    scores = p.softcap * torch.tanh(scores / p.softcap)
                out[t, head] = scores.softmax(0) @ s.v[first : t + 1, head // group].double()
        return out

    def assert_right(self, s: Conversation, answers: Sequence[Tensor]) -> None:
        got, wanted = torch.cat(list(answers)).double(), self.expected(s)
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() <= TOLERANCE[self.dtype] * wanted.abs().max()


VARIANTS = {
    "one query head a key head": (Heads(query=2, kv=2), None, None),
    "groups of three": (Heads(query=6, kv=2), None, None),
    "one key head": (Heads(query=4, kv=1), None, None),
    "wider keys": (Heads(key_dim=12, value_dim=8), None, None),
    "wider values": (Heads(key_dim=8, value_dim=20), None, None),
    "window of one": (Heads(), 1, None),
    "window": (Heads(), 7, None),
    "window of a block": (Heads(), 16, None),
    "softcap": (Heads(), None, 0.7),
    "softcap and window": (Heads(query=6, kv=2, value_dim=5), 9, 0.7),
}


@DTYPES
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_decode_prefill_and_chunks_share_a_step(
    variant: tuple[Heads, int | None, float | None], dtype: torch.dtype
) -> None:
    heads, window, softcap = variant
    case = Case(dtype, heads, AttentionParams(0.3, window, softcap))
    lengths = {1: 22, 2: 40, 3: 19, 4: 70}
    a, b, c, d = (case.sequence(length, seed) for seed, length in lengths.items())
    schedule = [
        [(a, 20), (b, 5), (d, 66)],
        [(b, 1), (a, 1), (c, 17), (d, 1)],
        [(c, 1), (b, 33), (d, 2), (a, 1)],
        [(d, 1), (c, 1), (b, 1)],
    ]
    answers: dict[int, list[Tensor]] = {seed: [] for seed in lengths}
    for parts in schedule:
        for (s, _), out in zip(parts, case.step(*parts), strict=True):
            answers[s.seed].append(out)
    for s in (a, b, c, d):
        case.assert_right(s, answers[s.seed])


@DTYPES
def test_lengths_around_blocks_and_paddings(dtype: torch.dtype) -> None:
    case = Case(dtype)
    sequences = [case.sequence(length, seed=length) for length in LENGTHS]
    before = [(s, n - 1) for s, n in zip(sequences, LENGTHS, strict=True) if n > 1]
    answers: dict[int, list[Tensor]] = {n: [] for n in LENGTHS}
    for parts in (before, [(s, 1) for s in sequences]):
        for (s, _), out in zip(parts, case.step(*parts), strict=True):
            answers[s.seed].append(out)
    for s in sequences:
        case.assert_right(s, answers[s.seed])


@pytest.mark.parametrize("length", LENGTHS)
def test_token_by_token_is_as_good_as_at_once(length: int) -> None:
    case = Case()
    s = case.sequence(length, seed=length)
    case.assert_right(s, [case.step((s, 1))[0] for _ in range(length)])


@DTYPES
@pytest.mark.parametrize(
    ("heads", "softcap"),
    [(Heads(), None), (Heads(key_dim=12, value_dim=8), None), (Heads(), 0.7)],
    ids=["plain", "wider keys", "softcap"],
)
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 127])
def test_a_sequence_gets_the_same_bits_whoever_is_beside_it(
    length: int, heads: Heads, softcap: float | None, dtype: torch.dtype
) -> None:
    def last_answer(others: Sequence[int]) -> Tensor:
        case = Case(dtype, heads, AttentionParams(0.3, softcap=softcap))
        company = [case.sequence(n, seed=100 + n) for n in others]
        mine = case.sequence(length, seed=7)
        everyone = [*company[:1], mine, *company[1:]]
        prompts = [(s, s.q.shape[0] - 1) for s in everyone if s.q.shape[0] > 1]
        if prompts:
            case.step(*prompts)
        return case.step(*[(s, 1) for s in everyone])[min(1, len(company))]

    alone = last_answer([])
    for others in ([length], [length] * 3, [1, 2, 3, 64, 65, 130], [40] * 15):
        assert torch.equal(last_answer(others), alone)


@DTYPES
def test_a_prompt_gets_the_same_bits_whoever_is_beside_it(dtype: torch.dtype) -> None:
    alone, together = Case(dtype), Case(dtype)
    others = [(together.sequence(30, 1), 30), (together.sequence(9, 2), 1)]
    mine = (together.sequence(21, 7), 21)
    answer = together.step(others[0], mine, others[1])[1]
    assert torch.equal(answer, alone.step((alone.sequence(21, 7), 21))[0])


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_stay_in_their_sequence(
    value: float, softcap: float | None
) -> None:
    case = Case(params=AttentionParams(0.3, softcap=softcap))
    sequences = [case.sequence(64, seed) for seed in range(NUM_BLOCKS // 4)]
    # Of all blocks, the cache's first is the most likely to be read by mistake.
    sick = next(s for s in sequences if 0 in s.block_table)
    sick.k[:], sick.v[:] = value, value
    sound = [s for s in sequences if s is not sick][:3]
    first = case.step((sick, 63), *[(s, 20 + i) for i, s in enumerate(sound)])
    second = case.step((sick, 1), *[(s, 1) for s in sound])
    for s, *answers in zip(sound, first[1:], second[1:], strict=True):
        case.assert_right(s, answers)


def test_what_an_earlier_owner_left_in_a_block_is_not_seen() -> None:
    case = Case()
    old = case.sequence(16, seed=1)
    old.k[:], old.v[:] = math.nan, math.nan
    case.step((old, 16))
    new = case.sequence(16, seed=2)
    new.block_table = old.block_table
    case.assert_right(new, [case.step((new, 5))[0], case.step((new, 1))[0]])


def test_layers_have_caches_of_their_own() -> None:
    layer = AttentionLayer(1, KvShape(1, 4, 4), AttentionParams(1.0))
    backend = TorchAttention({0: layer, 1: layer}, 2, BLOCK, torch.float32)
    q = torch.ones(1, 1, 4)
    for token, value in enumerate((1.0, 3.0)):
        backend.begin_step([AttentionSequence(0, 1, token, [1])])
        zero = backend.layer(0)(q, q, q * value)
        one = backend.layer(1)(q, q, q * -value)
    assert zero.flatten().tolist() == [2.0] * 4
    assert one.flatten().tolist() == [-2.0] * 4
