"""How many output tokens a second does the whole engine make, with and without adapters?

A Llama-3.1-8B shape, prompts of 128 tokens, 256 tokens of output, every request at once; and a
prefill of 32 prompts of 2048 tokens. Wall clock over the whole run, through the offline engine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_models import add_adapters, llama_engine
from benchmarks.report import finish
from benchmarks.workloads import BASE, rows_of
from loramux import LLM, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 256
PREFILL_PROMPTS, PREFILL_TOKENS = 32, 2048


@dataclass(frozen=True)
class Case:
    """Requests that start together."""

    batch: int
    popularity: str
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS

    @property
    def name(self) -> str:
        if self.output_tokens == 1:
            return f"prefill {self.batch}x{self.prompt_tokens} {self.popularity}"
        return f"batch {self.batch} {self.popularity}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        action="append",
        help="the adapters take them in turns; repeated, one set of adapters after the other",
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2, help="runs after the first one")
    parser.add_argument(
        "--popularity", nargs="+", default=["identical", "distinct", "half"], help="who asks whom"
    )
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("loramux.engine.adapters").setLevel(logging.WARNING)
    started = time.perf_counter()
    parts = llama_engine(
        layers=arguments.layers,
        max_loras=arguments.adapters,
        max_num_seqs=max(arguments.batches),
    )
    table = Table(LLM.over(parts), arguments.repeat)
    table.results["engine start (random weights), s"] = round(time.perf_counter() - started, 1)
    table.measure("before any adapter was loaded: ", Case(max(arguments.batches), "base"), [])
    for batch in arguments.batches:
        table.measure("", Case(batch, "base"), [])
    if not arguments.no_prefill:
        table.measure("", Case(PREFILL_PROMPTS, "base", PREFILL_TOKENS, 1), [])
    for ranks in arguments.ranks or [[16]]:
        for info in parts.core.adapters.infos():
            parts.core.adapters.unregister(info.name)
        names = [f"{ranks[i % len(ranks)]}-{i}" for i in range(arguments.adapters)]
        add_adapters(parts, names, ranks)
        label = f"rank {', '.join(map(str, ranks))}: "
        for batch, popularity in itertools.product(arguments.batches, arguments.popularity):
            if batch > 1 or popularity == "identical":
                table.measure(label, Case(batch, popularity), names)
        for popularity in ("identical", "distinct") if not arguments.no_prefill else ():
            table.measure(label, Case(PREFILL_PROMPTS, popularity, PREFILL_TOKENS, 1), names)
    finish(
        "serving_offline",
        vars(arguments) | {"gpu": torch.cuda.get_device_name()},
        table.results,
        arguments.out,
    )


class Table:
    """Results as they come, each beside the base's of the same batch."""

    def __init__(self, llm: LLM, repeat: int) -> None:
        self._llm = llm
        self._repeat = repeat
        self.results: dict[str, object] = {}

    def measure(self, label: str, case: Case, names: Sequence[str]) -> None:
        found = rate(self._llm, case, names, self._repeat)
        base = self.results.get(case.name.rsplit(" ", 1)[0] + " base")
        if isinstance(base, dict):
            found["of base"] = round(found["tokens/s"] / base["tokens/s"], 3)
        self.results[label + case.name] = found
        print(label + case.name, found, flush=True)


def rate(llm: LLM, case: Case, names: Sequence[str], repeat: int) -> dict[str, float]:
    """Tokens per second (of output, or of prompts in a prefill): the median run."""
    rates = [run(llm, case, names, seed) for seed in range(repeat + 1)][1:]
    return {
        "tokens/s": round(statistics.median(rates), 1),
        "spread": round(max(rates) - min(rates), 1),
    }


def run(llm: LLM, case: Case, names: Sequence[str], seed: int) -> float:
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(10, 100_000) for _ in range(case.prompt_tokens)] for _ in range(case.batch)
    ]
    adapters = [
        None if row == BASE else names[row]
        for row in rows_of(case.popularity, case.batch, len(names))
    ]
    params = SamplingParams(temperature=0, max_tokens=case.output_tokens, ignore_eos=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, adapter=adapters)
    seconds = time.perf_counter() - started
    output = sum(len(c.token_ids) for o in outputs for c in o.completions)
    assert output == case.batch * case.output_tokens
    return (case.batch * case.prompt_tokens if case.output_tokens == 1 else output) / seconds


if __name__ == "__main__":
    main()
