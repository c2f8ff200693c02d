"""Benchmarks run, with settings so small that their figures mean nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import bench_adapter_churn, bench_moe_lora_op
from benchmarks.bench_step import decode_plan
from benchmarks.gpu_models import add_adapters
from benchmarks.workloads import BASE
from transformers import PreTrainedModel

from loramux import LLM, SamplingParams
from loramux.testing import tiny_model
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_experts import build


def test_adapter_churn(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    bench_adapter_churn.main(
        [
            *("--base", str(tiny_base), "--dtype", "float32", "--out", str(out)),
            *("--adapters", "2", "6", "--slots", "2", "--host-share", "0.5", "--rank", "2"),
            *("--rate", "100", "--duration", "0.3", "--lengths", "2", "6", "--repeats", "1"),
            *("--threads", str(torch.get_num_threads())),
        ]
    )

    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(out.read_text(encoding="utf-8"))
    few, many = record["results"]["2 adapters"], record["results"]["6 adapters"]
    assert list(few) == ["all resident"]
    assert list(many) == ["all resident", "2 slots", "2 slots, 3 host copies"]
    assert many["all resident"]["slot evictions"] == 0
    assert many["2 slots"]["slot evictions"] > 0
    assert many["2 slots"]["slot hits"] < many["all resident"]["slot hits"] <= 1
    assert many["2 slots"]["host hits"] == 1
    assert many["2 slots, 3 host copies"]["host hits"] < 1
    assert many["2 slots, 3 host copies"]["host evictions"] > 0
    assert all(figures["output tokens/s"] > 0 for figures in many.values())


@pytest.mark.parametrize(
    "model", [tiny_model, lambda: build("Qwen3MoeConfig")], ids=["dense", "moe"]
)
def test_random_adapters_of_the_gpu_benchmarks_answer_and_differ(
    model: Callable[[], PreTrainedModel],
) -> None:
    parts = assemble_tiny(model(), device_cache="4MiB")
    add_adapters(parts, ["a", "b", "c"], [4, 8])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = LLM.over(parts).generate([[1, 2, 3]] * 4, params, adapter=[None, "a", "b", "c"])
    assert [info.max_rank for info in parts.core.adapters.infos()] == [4, 8, 4]
    assert all(output.completions[0].finish_reason == "length" for output in outputs)
    assert parts.core.stats().max_step_adapters == 3


def test_parts_of_a_step_are_told_apart() -> None:
    plan = decode_plan([0, 1, 2], context=20)
    assert [(s.start, len(s.block_table)) for s in plan.sequences] == [(20, 2)] * 3
    blocks = [block for s in plan.sequences for block in s.block_table]
    assert len(blocks) == len(set(blocks))


def test_the_experts_that_are_timed_are_right() -> None:
    """As far as the interpreter rounds to bfloat16, which it does by cutting off."""
    sizes = Namespace(experts=4, hidden=32, size=24, top_k=2, layers=2, rank=8)
    layers = bench_moe_lora_op.Layers(torch.device("cpu"), sizes, num_slots=2, max_tokens=8)
    layers.arena *= 10
    (index, _), weights = layers.chosen(6)
    x = torch.randn(6, 32).bfloat16()
    for slots in ([BASE] * 6, [0, 1, BASE, 1, 1, 0]):
        experts = bench_moe_lora_op.begin(layers, slots, rank=8)
        error = bench_moe_lora_op.relative_error(layers, experts, slots, x, index, weights)
        assert error < 0.05
    assert bench_moe_lora_op.floor_microseconds(layers, slots, index, 8) > 0
