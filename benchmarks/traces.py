"""Requests that come by themselves: when, for which adapter, and how long they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of outputs, each drawn evenly from ``low … high - 1``."""

    low: int
    high: int


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at: float
    """Seconds after the trace has begun."""
    adapter: int
    prompt_tokens: int
    output_tokens: int


def draw_trace(
    *,
    rate: float,
    duration: float,
    burstiness: float,
    alpha: float,
    num_adapters: int,
    lengths: Lengths,
    seed: int,
) -> list[Arrival]:
    """``rate * duration`` requests, by the distributions of S-LoRA's synthetic traces.

    Times between arrivals are gamma distributed with mean ``1 / rate``; ``burstiness`` is their
    coefficient of variation (1: a Poisson process). Adapters follow a power law: ``alpha`` 1 is
    uniform, and the smaller it is, the more requests go to few adapters.
    """
    draw = np.random.default_rng(seed)
    count = round(rate * duration)
    gaps = draw.gamma(burstiness**-2, burstiness**2 / rate, count)
    adapters = np.floor(draw.power(alpha, count) * num_adapters).astype(int)
    sizes = draw.integers(lengths.low, lengths.high, (count, 2))
    return [
        Arrival(float(at), int(adapter), int(prompt), int(output))
        for at, adapter, (prompt, output) in zip(np.cumsum(gaps), adapters, sizes, strict=True)
    ]
