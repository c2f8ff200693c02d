"""What does choosing tokens cost on a GPU, greedy and by each filter?

As an engine that runs ahead does it: a step is launched while the one before it is under way, and
then the one before is waited for. In place of the forward the GPU is kept busy for some
milliseconds, so that the host's work is hidden where it can be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from benchmarks.report import finish
from loramux.plan import Sample
from loramux.types import SamplingParams
from loramux.worker.drawing import draw_for
from loramux.worker.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0, logprobs=5),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 50, top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "flat, top_p 0.95": SamplingParams(temperature=4.0, top_p=0.95),
    "penalties": SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.1),
    "penalties, top_p 0.9": SamplingParams(top_p=0.9, frequency_penalty=0.5),
}
_WARM_UP = 5
_STEPS = 40
_FORWARD_CYCLES = 10_000_000
"""Some 5 ms: a forward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for rows in arguments.rows:
        logits = torch.randn(rows, arguments.vocab, device="cuda").mul(3).bfloat16()
        for kind, params in KINDS.items():
            name = f"{kind}, {rows} rows"
            results[name] = measure(logits, [_sample(params, row) for row in range(rows)])
            print(name, results[name], flush=True)
    finish(
        "sampler", vars(arguments) | {"gpu": torch.cuda.get_device_name()}, results, arguments.out
    )


def measure(logits: torch.Tensor, samples: list[Sample]) -> dict[str, float]:
    """Medians in microseconds: until a choice is launched, and what it takes the GPU."""
    sampler = Sampler(draw_for(logits.device))
    host: list[float] = []
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    before = None
    for _ in range(_WARM_UP + _STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_FORWARD_CYCLES)
        start.record()
        begun = time.perf_counter()
        sampling = sampler.launch(logits, samples)
        host.append((time.perf_counter() - begun) * 1e6)
        end.record()
        events.append((start, end))
        if before is not None:
            before.result()
        before = sampling
    torch.cuda.synchronize()
    gpu = [start.elapsed_time(end) * 1000 for start, end in events]
    return {
        "gpu": round(statistics.median(gpu[_WARM_UP:]), 1),
        "host": round(statistics.median(host[_WARM_UP:]), 1),
    }


def _sample(params: SamplingParams, row: int) -> Sample:
    tokens = [(31 * row + 7 * i) % 1000 for i in range(300)]
    return Sample(replace(params, seed=row), row, tokens, num_prompt_tokens=128, position=172)


if __name__ == "__main__":
    main()
