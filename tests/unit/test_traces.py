"""The traces that benchmarks play."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmarks.traces import Arrival, Lengths, draw_trace


def draw(**changes: Any) -> list[Arrival]:
    return draw_trace(
        **{
            "rate": 5.0,
            "duration": 2000.0,
            "burstiness": 1.0,
            "alpha": 1.0,
            "num_adapters": 10,
            "lengths": Lengths(8, 64),
            "seed": 42,
            **changes,
        }
    )


def share_of_first_adapter(trace: list[Arrival]) -> float:
    return Counter(arrival.adapter for arrival in trace)[0] / len(trace)


def test_a_seed_is_a_trace() -> None:
    assert draw() == draw()
    assert draw() != draw(seed=43)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_requests_come_at_the_rate_and_as_unevenly_as_asked_for(burstiness: float) -> None:
    trace = draw(burstiness=burstiness)
    gaps = [b.at - a.at for a, b in pairwise(trace)]
    assert len(trace) == 10_000
    assert np.mean(gaps) == pytest.approx(1 / 5, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness, rel=0.1)


def test_adapters_are_uniform_or_few_get_most() -> None:
    assert share_of_first_adapter(draw()) == pytest.approx(0.1, abs=0.02)
    # The first of ten gets a tenth to the power of alpha.
    assert share_of_first_adapter(draw(alpha=0.3)) == pytest.approx(0.1**0.3, abs=0.02)
    assert {arrival.adapter for arrival in draw()} == set(range(10))


def test_lengths_fill_their_range() -> None:
    trace = draw()
    for lengths in ([a.prompt_tokens for a in trace], [a.output_tokens for a in trace]):
        assert (min(lengths), max(lengths)) == (8, 63)
