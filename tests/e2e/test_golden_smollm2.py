"""SmolLM2-135M-Instruct and its six adapters answer as transformers + PEFT did."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux import LLM
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SchedulerOptions
from tests.golden.compare import all_rows, check, check_forced
from tests.golden.load import BASE, Golden

TOLERANCE = 1e-3
BFLOAT16_TOLERANCE = 0.5
"""transformers + PEFT itself differs by up to 0.29 in bfloat16, by the same comparison."""


def engine(base: Path, adapters: dict[str, Path], dtype: str, max_loras: int = 8) -> LLM:
    options = EngineOptions(
        model=ModelOptions(dtype=dtype, max_model_len=1024),
        adapters=AdapterOptions(max_loras=max_loras),
        # On a GPU every size of a step has graphs of its own, which take their time.
        scheduler=SchedulerOptions(max_num_seqs=64, max_step_tokens=512),
    )
    return LLM(str(base), adapters={n: str(p) for n, p in adapters.items()}, options=options)


@pytest.fixture(scope="module")
def llm(smollm2_base: Path, smollm2_adapters: dict[str, Path]) -> LLM:
    return engine(smollm2_base, smollm2_adapters, "float32")


def test_all_mixed_in_one_batch(llm: LLM, smollm2_golden: Golden) -> None:
    rows = all_rows(smollm2_golden)
    check(llm, smollm2_golden, rows, TOLERANCE)
    assert llm.stats().max_step_adapters == 6


@pytest.mark.parametrize(
    "name",
    [
        "emoji",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (BASE, "shout", "json", "pirate", "yesno", "spanish")
        ),
    ],
)
def test_each_adapter_alone(llm: LLM, smollm2_golden: Golden, name: str) -> None:
    rows = [(name, prompt) for prompt in smollm2_golden.prompts]
    check(llm, smollm2_golden, rows, TOLERANCE)


@pytest.mark.slow
def test_fewer_slots_than_adapters(
    smollm2_base: Path, smollm2_adapters: dict[str, Path], smollm2_golden: Golden
) -> None:
    llm = engine(smollm2_base, smollm2_adapters, "float32", max_loras=2)
    rows = [row for row in all_rows(smollm2_golden) if row[1] in ("t-france", "h-sea")]
    check(llm, smollm2_golden, rows, TOLERANCE)
    assert llm.stats().max_step_adapters == 2


def test_bfloat16_keeps_the_likelihoods(
    smollm2_base: Path, smollm2_adapters: dict[str, Path], smollm2_golden: Golden
) -> None:
    llm = engine(smollm2_base, smollm2_adapters, "bfloat16")
    rows = [row for row in all_rows(smollm2_golden) if row[1] in ("t-hot", "h-denmark")]
    check_forced(llm, smollm2_golden, rows, BFLOAT16_TOLERANCE)


def test_chat_prompts_have_the_golden_tokens(llm: LLM, smollm2_golden: Golden) -> None:
    for prompt in smollm2_golden.prompts.values():
        if prompt.kind == "chat":
            rendered = llm.text_of().render_chat([{"role": "user", "content": prompt.text}])
        else:
            rendered = llm.text_of().encode(prompt.text)
        assert tuple(rendered) == prompt.input_ids
