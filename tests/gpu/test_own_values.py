"""Adapters with values of their own on a GPU: right beside captured steps, and in none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from loramux import LLM
from tests.cpu.served import TARGETS
from tests.cpu.test_own_values import save
from tests.gpu.test_captured_steps import assemble, assert_right, generate, likelihoods, model

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"modules_to_save": ["norm", "input_layernorm"]},
    "bias": {"bias": "all", "lora_bias": True},
    "linear": {"modules_to_save": ["k_proj"], "target_modules": ["q_proj", "down_proj"]},
    "head": {"modules_to_save": ["lm_head"]},
    "ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "dora on ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
    "tokens": {"trainable_token_indices": [3, 10, 32, 61]},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("own")
    common = {"r": 4, "lora_alpha": 6, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM"}
    for name, change in KINDS.items():
        config = LoraConfig(**(common | change))
        save(model("float32"), config, folder / name)  # type: ignore[arg-type]
    return {name: folder / name for name in KINDS}


@pytest.fixture(scope="module")
def llm(adapters: dict[str, Path]) -> LLM:
    return LLM.over(assemble(max_loras=4), {name: str(path) for name, path in adapters.items()})


@pytest.mark.parametrize("name", [name for name in KINDS if name != "plain"])
def test_answers_are_those_of_peft(llm: LLM, adapters: dict[str, Path], name: str) -> None:
    assert_right(generate(llm, [name, None, "plain", name, None]), adapters)


def test_all_kinds_take_turns(llm: LLM, adapters: dict[str, Path]) -> None:
    assert_right(generate(llm, [*KINDS, None, *reversed(KINDS)]), adapters)


def test_base_rows_keep_every_bit_beside_them(llm: LLM) -> None:
    alone = likelihoods(generate(llm, [None] * 4))
    beside = likelihoods(generate(llm, [None, "norms", None, "head"]))
    assert [beside[0], beside[2]] == [alone[0], alone[2]]


def test_steps_without_them_are_captured_as_before(llm: LLM, adapters: dict[str, Path]) -> None:
    generate(llm, ["norms", "head"])
    assert_right(generate(llm, ["plain", None, "plain"]), adapters)
