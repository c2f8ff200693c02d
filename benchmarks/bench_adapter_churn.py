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
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.churn import Figures, Meter, Player, engine_over, medians, show
from benchmarks.report import finish
from benchmarks.traces import Lengths, draw_trace
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SchedulerOptions
from loramux.demo.base import demo_base
from loramux.engine.build import build_parts
from loramux.testing import random_adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_DISTINCT_FILES = 8
"""Files of weights. Adapters that share one differ in their scale, and so in their ids."""


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
            show(f"{num_adapters} adapters", found)
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
        # Every request computes its prompt, whoever has sent the same.
        scheduler=SchedulerOptions(max_step_tokens=arguments.max_step_tokens, prefix_cache=False),
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
    engine = engine_over(parts)
    await engine.start()
    stack.push_async_callback(engine.stop)
    sources = {str(index): str(maker.source(index)) for index in range(case.num_adapters)}
    await asyncio.gather(*(engine.load_adapter(name, path) for name, path in sources.items()))
    return Player(engine, Meter(parts))


if __name__ == "__main__":
    main()
