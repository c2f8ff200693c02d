"""Rows too long for the compiler to add up in one piece by itself: the same bits in every form."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux import LLM
from loramux.testing import random_adapter, tiny_model
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS
from tests.gpu.test_captured_steps import generate, likelihoods


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny_model(
        hidden_size=4096,
        intermediate_size=1024,
        num_layers=6,
        num_heads=32,
        num_kv_heads=8,
        dtype="bfloat16",
    )
    parts = assemble_tiny(
        model.cuda(),  # type: ignore[arg-type]
        max_loras=4,
        max_num_seqs=16,
        max_step_tokens=128,
        kv_blocks=256,
        device_cache="64MiB",
        host_cache="256MiB",
        prefix_cache=False,
    )
    adapters: dict[str, Path] = {
        name: random_adapter(
            folder / name,
            parts.worker.layout,
            rank=8,
            targets=TARGETS,
            seed=seed,
            dora=name == "dora",
        )
        for seed, name in enumerate(("one", "other", "dora"))
    }
    return LLM.over(parts, {name: str(path) for name, path in adapters.items()})


@pytest.mark.parametrize("company", [["one"], ["one", "other"], ["dora", "one"]], ids=str)
def test_base_rows_keep_every_bit_beside_adapters(llm: LLM, company: list[str]) -> None:
    alone = likelihoods(generate(llm, [None] * 12))
    names = [None, *company, *[None] * (11 - len(company))]
    beside = likelihoods(generate(llm, names))
    rows = [row for row, name in enumerate(names) if name is None]
    assert [row for row in rows if beside[row] != alone[row]] == []
