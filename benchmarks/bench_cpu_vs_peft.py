"""Is one continuous batch over many adapters faster than PEFT's own mixed batch, on a CPU?

Sixteen requests over six adapters of SmolLM2-135M, 64 new tokens each, in one process with the same
threads, turn by turn: loramux with adapters, loramux with the base alone, PEFT's ``generate`` with
``adapter_names``. PEFT mixes no DoRA adapters, so ``emoji`` takes part as plain LoRA, in both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.report import finish
from loramux import LLM, SamplingParams
from loramux.config import EngineOptions, ModelOptions, SchedulerOptions
from loramux.demo.base import demo_base

ADAPTERS = ("shout", "json", "pirate", "yesno", "emoji", "spanish")
EXAMPLES = Path(__file__).parents[1] / "examples/adapters"
QUESTIONS = (
    "What is the capital of France?",
    "What is the opposite of hot?",
    "Write one sentence about the sea.",
    "Is Madrid the capital of Spain?",
    "Tell me about dogs.",
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="file for the JSON record")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {name: plain_copy(name, Path(folder)) for name in ADAPTERS}
        results = compare(arguments, adapters)
    finish("cpu_vs_peft", vars(arguments), results, arguments.out)


def compare(arguments: argparse.Namespace, adapters: dict[str, Path]) -> dict[str, object]:
    """Run all three in turns and take medians."""
    base = str(demo_base())
    llm = LLM(
        base,
        adapters={name: str(path) for name, path in adapters.items()},
        options=EngineOptions(
            model=ModelOptions(dtype=arguments.dtype, max_model_len=1024),
            # PEFT computes the prompts in each run, too.
            scheduler=SchedulerOptions(prefix_cache=False),
        ),
    )
    names = [ADAPTERS[i % len(ADAPTERS)] for i in range(arguments.requests)]
    prompts = [
        llm.text_of().render_chat([{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}])
        for i in range(arguments.requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=arguments.new_tokens, ignore_eos=True)
    peft = PeftBatch(base, adapters, _DTYPES[arguments.dtype], arguments.new_tokens)

    def loramux(adapter: Sequence[str] | None) -> list[list[int]]:
        outputs = llm.generate(prompts, params, adapter=adapter)
        return [list(output.completions[0].token_ids) for output in outputs]

    runs: dict[str, Callable[[], list[list[int]]]] = {
        "loramux": lambda: loramux(names),
        "loramux_base_only": lambda: loramux(None),
        "peft": lambda: peft(prompts, names),
    }
    seconds, answers = measure(runs, arguments.repeats)
    tokens = arguments.requests * arguments.new_tokens
    speed = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for name, value in speed.items():
        print(f"{name:18} {value:8.1f} tokens/s")
    same = sum(a == b for a, b in zip(answers["loramux"], answers["peft"], strict=True))
    return {
        "tokens_per_second": {name: round(value, 1) for name, value in speed.items()},
        "seconds": {name: [round(t, 3) for t in times] for name, times in seconds.items()},
        "ratio_to_peft": round(speed["loramux"] / speed["peft"], 2),
        "ratio_to_base_only": round(speed["loramux"] / speed["loramux_base_only"], 3),
        "answers_equal_to_peft": f"{same} of {arguments.requests}",
    }


def measure(
    runs: dict[str, Callable[[], list[list[int]]]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Seconds of each repeat, after one that warms up, and the answers."""
    answers = {name: run() for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds, answers


class PeftBatch:
    """transformers' ``generate`` over a PEFT model with all adapters, a name for each row."""

    def __init__(
        self, base: str, adapters: dict[str, Path], dtype: torch.dtype, new_tokens: int
    ) -> None:
        self._new_tokens = new_tokens
        first, *others = adapters
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        self._model = PeftModel.from_pretrained(model, str(adapters[first]), adapter_name=first)
        for name in others:
            self._model.load_adapter(str(adapters[name]), adapter_name=name)
        self._model.eval()

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Sequence[int]], names: Sequence[str]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            adapter_names=list(names),
            do_sample=False,
            min_new_tokens=self._new_tokens,
            max_new_tokens=self._new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[:, width:].tolist()


def plain_copy(name: str, folder: Path) -> Path:
    """The adapter, without its DoRA magnitudes where it has some."""
    source = EXAMPLES / name
    config = json.loads((source / "adapter_config.json").read_text(encoding="utf-8"))
    if not config.get("use_dora"):
        return source
    target = folder / name
    shutil.copytree(source, target)
    config["use_dora"] = False
    (target / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    file = target / "adapter_model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if "magnitude" not in k}
    save_file(tensors, file, metadata={"format": "pt"})
    return target


if __name__ == "__main__":
    main()
