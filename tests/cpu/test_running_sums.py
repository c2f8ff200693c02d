"""Sums of whole numbers against plain loops over sorted lists."""

from __future__ import annotations

from itertools import accumulate, product
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loramux.worker.running_sums import RunningSums, last_key_kept

MAX_KEY = 2**31 - 1

keys = st.integers(0, 5) | st.integers(0, MAX_KEY) | st.sampled_from([2**15 - 1, 2**15, MAX_KEY])
weights = st.sampled_from([0, 1, 2**50]) | st.integers(0, 2**50)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
shares |= st.sampled_from([5e-324, 1e-20, 0.5, 1 - 2**-53])
rows = st.lists(st.tuples(keys, weights), min_size=1, max_size=600).filter(
    lambda row: any(weight for _, weight in row)
)


def last_of_sorted(row: list[tuple[int, int]], share: float) -> int:
    """What ``last_key_kept`` means, on one row of (key, weight)."""
    total = sum(weight for _, weight in row)
    target = ceil(float(total) * share)
    in_order = sorted(row)
    sums = accumulate(weight for _, weight in in_order)
    return next(key for (key, _), s in zip(in_order, sums, strict=True) if s >= target)


def last_of(batch: list[list[tuple[int, int]]], given_shares: list[float]) -> list[int]:
    batch_keys = torch.tensor([[key for key, _ in row] for row in batch], dtype=torch.int32)
    batch_weights = torch.tensor([[weight for _, weight in row] for row in batch])
    share = torch.tensor(given_shares, dtype=torch.float64)[:, None]
    return last_key_kept(batch_keys, batch_weights, share)[:, 0].tolist()


@settings(max_examples=150, deadline=None)
@given(rows, shares)
def test_the_last_key_is_that_of_a_sorted_list(row: list[tuple[int, int]], share: float) -> None:
    assert last_of([row], [share]) == [last_of_sorted(row, share)]


@pytest.mark.parametrize("share", [1e-9, 0.3, 0.5, 0.9, 1 - 2**-53])
@pytest.mark.parametrize(
    "row",
    [
        [(7, 1)] * 300,
        [(i, 2**44) for i in range(300)],
        [(i, 2**44 if i == 17 else 0) for i in range(300)],
        [(i << 15, 2**61 >> i) for i in range(62)],
        [(3 * 2**15 + i, 2**61 >> i) for i in range(62)],
        [(i, 2**61 - i) for i in range(2)],
    ],
    ids=["equal", "flat", "one", "many buckets", "one bucket", "rounded up"],
)
def test_rows_of_special_shapes(row: list[tuple[int, int]], share: float) -> None:
    assert last_of([row], [share]) == [last_of_sorted(row, share)]


def test_rows_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    row = [
        list(zip(*torch.randint(0, 2**20, (2, 400), generator=generator).tolist(), strict=True))
        for _ in range(5)
    ]
    batch = list(product(row, [0.2, 0.7, 0.99]))
    together = last_of([row for row, _ in batch], [share for _, share in batch])
    assert together == [last_of_sorted(row, share) for row, share in batch]


@pytest.mark.parametrize("places", [1, 3, 255, 256, 257, 700])
def test_the_place_reached_is_that_of_a_running_sum(places: int) -> None:
    generator = torch.Generator().manual_seed(places)
    some: Tensor = torch.randint(0, 4, (40, places), generator=generator)
    some[:, -1] += 1
    sums = RunningSums(some)
    assert torch.equal(sums.total, some.sum(-1, keepdim=True))
    target = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None] * sums.total
    target = target.long().clamp(min=1)
    place, before = sums.reach(target)
    for i, row in enumerate(some.tolist()):
        reached = list(accumulate(row))
        expected = next(n for n, s in enumerate(reached) if s >= target[i])
        assert place[i] == expected
        assert before[i] == reached[expected] - row[expected]
