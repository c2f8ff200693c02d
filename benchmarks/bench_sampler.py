"""What does choosing tokens cost on a GPU, greedy and by each filter?"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from benchmarks.report import finish
from loramux.plan import Sample
from loramux.types import SamplingParams
from loramux.worker.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0, logprobs=5),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 50, top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "penalties": SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.1),
}
_STEPS = 20
_BUSY_CYCLES = 100_000_000
"""Some 50 ms, in which the host gets ahead."""


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
    """Microseconds of one choice: until it is launched, and until the GPU has made it.

    The GPU's part is of choices one behind the other, as between the forwards of steps.
    """
    sampler = Sampler()
    for _ in range(3):
        sampler.launch(logits, samples).result()
    host, whole = [], []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_BUSY_CYCLES)
        start.record()
        begun = time.perf_counter()
        sampling = [sampler.launch(logits, samples) for _ in range(_STEPS)]
        host.append((time.perf_counter() - begun) / _STEPS * 1e6)
        end.record()
        sampling[-1].result()
        whole.append(start.elapsed_time(end) * 1000 / _STEPS)
    return {"gpu": round(statistics.median(whole), 1), "host": round(statistics.median(host), 1)}


def _sample(params: SamplingParams, row: int) -> Sample:
    tokens = range(row, row + 300)
    return Sample(replace(params, seed=row), row, tokens, num_prompt_tokens=128, position=172)


if __name__ == "__main__":
    main()
