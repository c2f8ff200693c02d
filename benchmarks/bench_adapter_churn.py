"""What does it cost to serve more adapters than there are slots, on a CPU?

A trace of requests over N adapters (``traces.py``) is played through the engine's thread in real
time, twice in turns: with a slot for each adapter (all resident), and with few slots, so that
adapters come and go. Everything else is equal, the adapters and their requests as well, so the
difference is what churn costs. Optionally a third time, with fewer copies in host memory than
adapters: the others are read from their files again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import finish
from benchmarks.traces import Arrival, Lengths, draw_trace
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SchedulerOptions
from loramux.demo.base import demo_base
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.build import Parts, build_parts
from loramux.engine.origins import Origin
from loramux.plan import SlotOrder
from loramux.testing import random_adapter
from loramux.types import Delta, GenerationRequest, SamplingParams

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DISTINCT_FILES = 8
"""Files of weights. Adapters that share one differ in their scale, and so in their ids."""
_PROMPT_TOKEN = 10

Figures = dict[str, float]


@dataclass(frozen=True)
class Case:
    """Where ``num_adapters`` adapters may be."""

    num_adapters: int
    num_slots: int
    num_copies: int

    @property
    def name(self) -> str:
        if self.num_slots == self.num_adapters:
            return "all resident"
        copies = "" if self.num_copies == self.num_adapters else f", {self.num_copies} host copies"
        return f"{self.num_slots} slots{copies}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 16, 64, 256, 1000])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument(
        "--host-share", type=float, help="a third case, with copies of this part of the adapters"
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of a trace")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: a Poisson process")
    parser.add_argument("--alpha", type=float, default=1.0, help="popularity; 1: uniform")
    parser.add_argument("--lengths", type=int, nargs=2, default=[8, 64], metavar=("LOW", "HIGH"))
    parser.add_argument("--repeats", type=int, default=3, help="traces, each with the next seed")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--max-step-tokens", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", help="folder of a model; default: the demo's")
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    arguments.base = arguments.base or str(demo_base())
    results: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory() as folder:
        maker = AdapterMaker(Path(folder), arguments)
        for num_adapters in arguments.adapters:
            cases = cases_of(num_adapters, arguments.slots, arguments.host_share)
            found = asyncio.run(compare(cases, maker, arguments))
            results[f"{num_adapters} adapters"] = found
            show(num_adapters, found)
    shown = vars(arguments) | {"base": Path(arguments.base).name}
    finish("adapter_churn", shown, results, arguments.out)


def cases_of(num_adapters: int, num_slots: int, host_share: float | None) -> list[Case]:
    """The case that others are measured against comes first."""
    cases = [Case(num_adapters, num_adapters, num_adapters)]
    if num_slots < num_adapters:
        cases.append(Case(num_adapters, num_slots, num_adapters))
        if host_share is not None:
            num_copies = max(num_slots, round(host_share * num_adapters))
            cases.append(Case(num_adapters, num_slots, num_copies))
    return cases


class AdapterMaker:
    """Writes adapters of one rank, and knows how many bytes each takes in an engine."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self._folder = folder
        parts = build_parts(arguments.base, engine_options(arguments, AdapterOptions(max_loras=1)))
        self._files = [
            random_adapter(
                folder / f"file-{seed}",
                parts.worker.layout,
                rank=arguments.rank,
                targets=TARGETS,
                seed=seed,
            )
            for seed in range(_DISTINCT_FILES)
        ]
        self.num_bytes = parts.worker.read_adapter("probe", self._files[0]).num_bytes

    def source(self, index: int) -> Path:
        """The folder of an adapter that no other index has."""
        folder = self._folder / str(index)
        if not folder.exists():
            file = self._files[index % _DISTINCT_FILES]
            folder.mkdir()
            os.link(file / "adapter_model.safetensors", folder / "adapter_model.safetensors")
            config = json.loads((file / "adapter_config.json").read_text(encoding="utf-8"))
            config["lora_alpha"] *= 1 + index / 1e6
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


def engine_options(arguments: argparse.Namespace, adapters: AdapterOptions) -> EngineOptions:
    return EngineOptions(
        # Room for one token more than the longest request has.
        model=ModelOptions(dtype=arguments.dtype, max_model_len=2 * arguments.lengths[1]),
        adapters=adapters,
        scheduler=SchedulerOptions(max_step_tokens=arguments.max_step_tokens),
    )


async def compare(
    cases: Sequence[Case], maker: AdapterMaker, arguments: argparse.Namespace
) -> dict[str, Figures]:
    """Play every trace in every case, turn by turn, after one at once that warms up; medians."""
    lengths = Lengths(*arguments.lengths)
    warm_up, *traces = [
        draw_trace(
            rate=arguments.rate,
            duration=arguments.duration,
            burstiness=arguments.burstiness,
            alpha=arguments.alpha,
            num_adapters=cases[0].num_adapters,
            lengths=lengths,
            seed=arguments.seed + repeat,
        )
        for repeat in range(-1, arguments.repeats)
    ]
    runs: dict[str, list[Figures]] = {case.name: [] for case in cases}
    async with AsyncExitStack() as stack:
        players = [await start(case, maker, arguments, stack) for case in cases]
        for player in players:
            await player.play([replace(arrival, at=0.0) for arrival in warm_up])
        for trace in traces:
            for case, player in zip(cases, players, strict=True):
                runs[case.name].append(await player.play(trace))
    resident = [run["output tokens/s"] for run in runs[cases[0].name]]
    for case in cases[1:]:
        for run, at_best in zip(runs[case.name], resident, strict=True):
            run["of all resident"] = run["output tokens/s"] / at_best
    return {name: medians(found) for name, found in runs.items()}


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each figure by itself."""
    return {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}


async def start(
    case: Case, maker: AdapterMaker, arguments: argparse.Namespace, stack: AsyncExitStack
) -> Player:
    """An engine with all adapters loaded, stopped with the stack."""
    adapters = AdapterOptions(
        max_loras=case.num_slots,
        device_cache=str(case.num_slots * maker.num_bytes),
        host_cache=str(case.num_copies * maker.num_bytes),
    )
    parts = build_parts(arguments.base, engine_options(arguments, adapters))
    engine = AsyncEngine(
        parts.core,
        parts.worker,
        parts.admission,
        parts.languages,
        base_name=parts.base_name,
        max_open=100_000,
        sources=parts.sources,
    )
    await engine.start()
    stack.push_async_callback(engine.stop)
    sources = {str(index): str(maker.source(index)) for index in range(case.num_adapters)}
    await asyncio.gather(*(engine.load_adapter(name, path) for name, path in sources.items()))
    return Player(engine, Meter(parts))


class Player:
    """Plays traces through one engine."""

    def __init__(self, engine: AsyncEngine, meter: Meter) -> None:
        self._engine = engine
        self._meter = meter

    async def play(self, trace: Sequence[Arrival]) -> Figures:
        """Submit each request when its time has come; figures of the whole trace."""
        before = self._engine.stats()
        self._meter.clear()
        began = time.perf_counter()
        waits = await asyncio.gather(*(self._ask(arrival, began) for arrival in trace))
        seconds = time.perf_counter() - began
        after = self._engine.stats()
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
        request = GenerationRequest(
            prompt_token_ids=[_PROMPT_TOKEN] * arrival.prompt_tokens,
            params=SamplingParams(temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True),
            model=str(arrival.adapter),
        )
        first: float | None = None
        async for delta in self._engine.submit(request):
            assert delta.error is None, delta.error
            first = first or time.perf_counter() - due
        assert first is not None
        return first


@dataclass(frozen=True)
class _Step:
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int


class Meter:
    """Watches an engine from outside: its steps, slot orders and fetches of adapters."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._steps: list[_Step] = []
        self._orders: list[float] = []
        self.num_fetches = 0
        self._watch_steps()
        self._watch_orders()
        self._watch_fetches()

    def clear(self) -> None:
        self._steps.clear()
        self._orders.clear()
        self.num_fetches = 0

    def figures(self) -> Figures:
        every = [step.seconds for step in self._steps]
        decoding = [step.seconds for step in self._steps if not step.num_prompt_tokens]
        return {
            "steps": len(every),
            "rows a step": sum(step.num_output_tokens for step in self._steps) / len(every),
            **_spread("step", every),
            **_spread("step without a prompt", decoding),
            "slot orders, s": sum(self._orders),
            "slot orders of a step p99, ms": 1000 * float(np.quantile(self._orders or [0], 0.99)),
        }

    def _watch_steps(self) -> None:
        core, step = self._parts.core, self._parts.core.step

        def watched() -> list[Delta]:
            before, began = core.stats(), time.perf_counter()
            deltas = step()
            seconds, after = time.perf_counter() - began, core.stats()
            if after.num_steps > before.num_steps:
                num_prompt_tokens = after.prompt_tokens - before.prompt_tokens
                self._steps.append(_Step(seconds, num_prompt_tokens, len(deltas)))
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


def show(num_adapters: int, found: dict[str, Figures]) -> None:
    """A table: a row for each figure, a column for each case."""
    print(f"\n{num_adapters} adapters{'':19}", *(f"{name:>26}" for name in found))
    for figure in dict.fromkeys(itertools.chain.from_iterable(found.values())):
        values = (figures.get(figure, float("nan")) for figures in found.values())
        print(f"{figure:32}", *(f"{value:26.3f}" for value in values), flush=True)


if __name__ == "__main__":
    main()
