"""Plays traces through an engine, and watches what they cost: steps, slot orders, fetches."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.traces import Arrival
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.build import Parts
from loramux.engine.origins import Origin
from loramux.plan import SlotOrder
from loramux.types import Delta, GenerationRequest, SamplingParams

_PROMPT_TOKEN = 10
_BOUND = 1.5
"""Times the median: what a step should take at most."""

Figures = dict[str, float]


def engine_over(parts: Parts) -> AsyncEngine:
    """An engine that takes any number of requests."""
    return AsyncEngine(parts.service(max_open=100_000))


def request_for(model: str, num_prompt_tokens: int, num_output_tokens: int) -> GenerationRequest:
    """Greedy, of exactly so many tokens."""
    return GenerationRequest(
        prompt_token_ids=[_PROMPT_TOKEN] * num_prompt_tokens,
        params=SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True),
        model=model,
    )


async def first_token_seconds(engine: AsyncEngine, request: GenerationRequest, due: float) -> float:
    """Ask, and read to the end; seconds from ``due`` (of ``perf_counter``) to the first token."""
    first: float | None = None
    async for delta in await engine.submit(request):
        assert delta.error is None, delta.error
        first = first or time.perf_counter() - due
    assert first is not None
    return first


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each figure by itself."""
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


def rounded(figures: Figures) -> Figures:
    return {name: round(value, 5) for name, value in figures.items()}


class Player:
    """Plays traces through one engine."""

    def __init__(self, engine: AsyncEngine, meter: Meter) -> None:
        self._engine = engine
        self._meter = meter

    async def play(self, trace: Sequence[Arrival]) -> Figures:
        """Submit each request when its time has come; figures of the whole trace."""
        before = await self._engine.stats()
        self._meter.clear()
        began = time.perf_counter()
        waits = await asyncio.gather(*(self._ask(arrival, began) for arrival in trace))
        seconds = time.perf_counter() - began
        after = await self._engine.stats()
        assert after.output_tokens - before.output_tokens == sum(a.output_tokens for a in trace)
        preemptions = after.preemptions - before.preemptions
        loads = after.slot_loads - before.slot_loads
        started = len(trace) + preemptions
        return {
            "output tokens/s": (after.output_tokens - before.output_tokens) / seconds,
            "first token p50, s": float(np.quantile(waits, 0.5)),
            "first token p99, s": float(np.quantile(waits, 0.99)),
            **self._meter.figures(),
            "slot hits": 1 - loads / started,
            "host hits": 1 - self._meter.num_fetches / started,
            "slot evictions": after.slot_evictions - before.slot_evictions,
            "host evictions": after.host_evictions - before.host_evictions,
            "slot drains": after.slot_drains - before.slot_drains,
            "preemptions": preemptions,
        }

    async def _ask(self, arrival: Arrival, began: float) -> float:
        """Seconds from the time of arrival to the first token."""
        due = began + arrival.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        request = request_for(str(arrival.adapter), arrival.prompt_tokens, arrival.output_tokens)
        return await first_token_seconds(self._engine, request, due)


@dataclass(frozen=True)
class _Step:
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_loads: int


class Meter:
    """Watches an engine from outside: its steps, slot orders and fetches of adapters."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._steps: list[_Step] = []
        self._orders: list[float] = []
        self.num_fetches = self.num_idle = 0
        self._watch_steps()
        self._watch_orders()
        self._watch_fetches()

    def clear(self) -> None:
        self._steps.clear()
        self._orders.clear()
        self.num_fetches = self.num_idle = 0

    def figures(self) -> Figures:
        """Of the steps that began beside running sequences, which a slow one would hold up.

        The first step of an idle engine is that of whoever has just come: where the engine runs
        ahead, it launches two steps and waits for the first.
        """
        every = [step.seconds for step in self._steps]
        decoding = [step.seconds for step in self._steps if not step.num_prompt_tokens]
        # Where the engine runs ahead, what a step brings in may hold up the next one to end.
        loading = [
            step.seconds
            for before, step in itertools.pairwise([_Step(0, 0, 0, 0), *self._steps])
            if before.num_loads or step.num_loads
        ]
        bound = _BOUND * float(np.median(every))
        return {
            "steps": len(every),
            "first steps of an idle engine": self.num_idle,
            "rows a step": sum(step.num_output_tokens for step in self._steps) / len(every),
            **_spread("step", every),
            **_spread("step without a prompt", decoding),
            "step max, ms": 1000 * max(every),
            "steps above 1.5 of the median": sum(seconds > bound for seconds in every),
            "steps with a load": len(loading),
            "of these above 1.5 of the median": sum(seconds > bound for seconds in loading),
            "slot orders, s": sum(self._orders),
            "slot orders of a step p99, ms": 1000 * float(np.quantile(self._orders or [0], 0.99)),
        }

    def _watch_steps(self) -> None:
        core, step = self._parts.core, self._parts.core.step

        def watched() -> list[Delta]:
            before, began = core.stats(), time.perf_counter()
            deltas = step()
            seconds, after = time.perf_counter() - began, core.stats()
            if after.num_steps > before.num_steps and not before.num_running:
                self.num_idle += 1
            elif after.num_steps > before.num_steps:
                self._steps.append(
                    _Step(
                        seconds,
                        after.prompt_tokens - before.prompt_tokens,
                        len(deltas),
                        after.slot_loads - before.slot_loads,
                    )
                )
            return deltas

        core.step = watched

    def _watch_orders(self) -> None:
        worker, apply = self._parts.worker, self._parts.worker.apply

        def watched(orders: Sequence[SlotOrder]) -> None:
            began = time.perf_counter()
            apply(orders)
            if orders:
                self._orders.append(time.perf_counter() - began)

        worker.apply = watched

    def _watch_fetches(self) -> None:
        core, take_fetches = self._parts.core, self._parts.core.take_fetches

        def watched() -> list[Origin]:
            origins = take_fetches()
            self.num_fetches += len(origins)
            return origins

        core.take_fetches = watched


def _spread(name: str, seconds: Sequence[float]) -> Figures:
    median, p99 = np.quantile(seconds, 0.5), np.quantile(seconds, 0.99)
    return {
        f"{name} p50, ms": 1000 * float(median),
        f"{name} p99, ms": 1000 * float(p99),
        f"{name} p99 / p50": float(p99 / median),
    }


def show(title: str, found: dict[str, Figures]) -> None:
    """A table: a row for each figure, a column for each case."""
    print(f"\n{title:32}", *(f"{name:>26}" for name in found))
    for figure in dict.fromkeys(itertools.chain.from_iterable(found.values())):
        values = (figures.get(figure, float("nan")) for figures in found.values())
        print(f"{figure:32}", *(f"{value:26.3f}" for value in values), flush=True)
