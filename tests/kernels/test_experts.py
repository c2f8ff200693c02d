"""Engines whose experts the kernels compute, against weights with the deltas added."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from loramux import LLM
from loramux.worker.backends import Backends
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_experts import (
    EXPERTS,
    ask,
    build,
    check,
    on_routers,
    per_expert,
    with_deltas,
    write,
)
from tests.kernels.backends import called_backends, compiled_backends


@pytest.mark.parametrize(
    ("family", "backends"),
    [
        ("Qwen3MoeConfig", called_backends),
        ("DeepseekV3Config", compiled_backends),
    ],
    ids=["Qwen3-MoE called", "DeepSeek-V3 compiled"],
)
def test_mixed_adapters_answer_as_with_the_deltas_in_the_weights(
    family: str,
    backends: Callable[..., Backends],
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loramux.engine.build.choose_backends", backends)
    model = build(family)
    adapters = {
        "all": per_expert(model, ("gate_proj", "up_proj", "down_proj"), range(EXPERTS), (4,)),
        "some": per_expert(model, ("up_proj", "down_proj"), (0, 3), (1, 5, 8)),
        "routers": {**on_routers(model), **per_expert(model, ("gate_proj",), (1,), (2,))},
    }
    for name, weights in adapters.items():
        write(tmp_path / name, weights)
    models = {name: with_deltas(model, weights) for name, weights in adapters.items()}
    base = copy.deepcopy(model)
    llm = LLM.over(
        assemble_tiny(model.to(device)), {name: str(tmp_path / name) for name in adapters}
    )
    outputs = ask(llm, [None, *adapters], prompts=[[5, 77, 31], [9]], max_tokens=2)
    check(outputs, {None: base, **models})
    assert not counters["graph_break"]
