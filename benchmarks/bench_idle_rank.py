"""Is an adapter of a small rank slower while one of a large rank is loaded and idle?

As ``bench_serving_offline``: 64 requests for one adapter of rank 8, before and after one of rank
128 has been loaded and has answered.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.bench_serving_offline import Case, Table, run
from benchmarks.gpu_models import add_adapters, llama_engine
from benchmarks.report import finish
from loramux import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--small", type=int, default=8, help="rank of the adapter that is asked")
    parser.add_argument("--large", type=int, default=128, help="rank of the one that is idle")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    parts = llama_engine(max_loras=32, max_num_seqs=arguments.batch)
    table = Table(LLM.over(parts), arguments.repeat)
    case = Case(arguments.batch, "identical")
    add_adapters(parts, ["small"], [arguments.small])
    table.measure(f"rank {arguments.small} alone: ", case, ["small"])
    add_adapters(parts, ["large"], [arguments.large])
    run(LLM.over(parts), Case(2, "identical", 16, 4), ["large"], seed=0)
    table.measure(
        f"rank {arguments.small}, one of rank {arguments.large} loaded and idle: ", case, ["small"]
    )
    finish(
        "idle_rank",
        vars(arguments) | {"gpu": torch.cuda.get_device_name()},
        table.results,
        arguments.out,
    )


if __name__ == "__main__":
    main()
