"""How many output tokens a second does the whole engine make, with and without adapters?

The table of DESIGN 6: a Llama-3.1-8B shape, prompts of 128 tokens, 256 tokens of output, every
request at once; and a prefill of 32 prompts of 2048 tokens. Wall clock over the whole run.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.llama import add_adapters, llama_engine
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
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument(
        "--popularity", nargs="+", default=["identical", "distinct", "half"], help="who asks whom"
    )
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    parts = llama_engine(
        layers=arguments.layers,
        max_loras=arguments.adapters,
        max_num_seqs=max(arguments.batches),
    )
    start_seconds = time.perf_counter() - started
    llm = LLM.over(parts)
    names = [f"a{i}" for i in range(arguments.adapters)]
    results: dict[str, object] = {"engine start (random weights), s": round(start_seconds, 1)}
    cases = [Case(batch, "base") for batch in arguments.batches]
    before = {case.name: rate(llm, case, names, arguments.repeat) for case in cases}
    add_adapters(parts, names, arguments.rank)
    cases += [
        Case(batch, popularity)
        for batch in arguments.batches
        for popularity in arguments.popularity
        if batch > 1 or popularity == "identical"
    ]
    if not arguments.no_prefill:
        cases += [
            Case(PREFILL_PROMPTS, popularity, PREFILL_TOKENS, 1)
            for popularity in ("base", "identical", "distinct")
        ]
    for case in cases:
        found = rate(llm, case, names, arguments.repeat)
        if case.popularity == "base" and case.name in before:
            found["before any adapter was loaded"] = before[case.name]["tokens/s"]
        base = results.get(case.name.rsplit(" ", 1)[0] + " base")
        if isinstance(base, dict):
            found["of base"] = round(found["tokens/s"] / base["tokens/s"], 3)
        results[case.name] = found
        print(case.name, found, flush=True)
    finish(
        "serving_offline",
        vars(arguments) | {"gpu": torch.cuda.get_device_name()},
        results,
        arguments.out,
    )


def rate(llm: LLM, case: Case, names: list[str], repeat: int) -> dict[str, float]:
    """Tokens per second (of output, or of prompts in a prefill): the median run."""
    rates = [run(llm, case, names, seed) for seed in range(repeat + 1)][1:]
    return {
        "tokens/s": round(statistics.median(rates), 1),
        "spread": round(max(rates) - min(rates), 1),
    }


def run(llm: LLM, case: Case, names: list[str], seed: int) -> float:
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
