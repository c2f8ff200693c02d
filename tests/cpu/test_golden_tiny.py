"""The trained tiny model and its adapters answer as transformers + PEFT did, in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loramux import LLM, SamplingParams
from loramux.config import AdapterOptions, EngineOptions, ModelOptions, SchedulerOptions
from loramux.errors import AdapterRefused
from tests.golden.compare import all_rows, check, check_forced, run
from tests.golden.load import BASE, Golden

TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.5


def engine(
    base: Path, adapters: dict[str, Path], *, max_loras: int = 8, **scheduler: object
) -> LLM:
    options = EngineOptions(
        model=ModelOptions(dtype="float32"),
        adapters=AdapterOptions(max_loras=max_loras),
        scheduler=SchedulerOptions(**scheduler),  # type: ignore[arg-type]
    )
    return LLM(str(base), adapters={n: str(p) for n, p in adapters.items()}, options=options)


@pytest.fixture(scope="module")
def llm(tiny_base: Path, tiny_adapters: dict[str, Path]) -> LLM:
    return engine(tiny_base, tiny_adapters)


def test_each_adapter_alone(llm: LLM, tiny_golden: Golden) -> None:
    for name in tiny_golden.outputs:
        rows = [(name, prompt) for prompt in tiny_golden.prompts]
        check(llm, tiny_golden, rows, TOLERANCE)


def test_one_request_at_a_time(llm: LLM, tiny_golden: Golden) -> None:
    for row in all_rows(tiny_golden)[:6]:
        check(llm, tiny_golden, [row], TOLERANCE)


def test_all_mixed_in_one_batch(llm: LLM, tiny_golden: Golden) -> None:
    rows = all_rows(tiny_golden)
    check(llm, tiny_golden, rows, TOLERANCE)
    assert llm.stats().max_step_adapters == len(tiny_golden.adapter_names)


@pytest.mark.parametrize("max_loras", [1, 2])
def test_fewer_slots_than_adapters(
    tiny_base: Path, tiny_adapters: dict[str, Path], tiny_golden: Golden, max_loras: int
) -> None:
    llm = engine(tiny_base, tiny_adapters, max_loras=max_loras)
    rows = all_rows(tiny_golden)
    check(llm, tiny_golden, rows, TOLERANCE)
    stats = llm.stats()
    assert stats.max_step_adapters == max_loras
    assert stats.slot_evictions >= len(tiny_golden.adapter_names) - max_loras


def test_too_few_blocks_preempt_and_recompute(
    tiny_base: Path, tiny_adapters: dict[str, Path], tiny_golden: Golden
) -> None:
    # Nine blocks of 8 KiB: one sequence of the greatest length and a little more.
    llm = engine(tiny_base, tiny_adapters, kv_cache=str(9 * 16 * 4 * 2 * 2 * 32 * 4))
    rows = all_rows(tiny_golden)
    check(llm, tiny_golden, rows, TOLERANCE)
    assert llm.stats().preemptions > 0


def test_prompts_read_in_chunks_of_a_few_tokens(
    tiny_base: Path, tiny_adapters: dict[str, Path], tiny_golden: Golden
) -> None:
    llm = engine(tiny_base, tiny_adapters, max_num_seqs=3, max_step_tokens=3)
    rows = all_rows(tiny_golden)
    check(llm, tiny_golden, rows, TOLERANCE)


@pytest.mark.parametrize("base_rows_first", [True, False])
def test_base_rows_are_bit_identical_alone_and_beside_adapters(
    llm: LLM, tiny_golden: Golden, base_rows_first: bool
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=5, ignore_eos=True)
    base_rows = [(BASE, prompt) for prompt in tiny_golden.prompts]
    others = [(name, "1") for name in tiny_golden.adapter_names]
    plain = [(BASE, "1") for _ in others]
    for_base = slice(0, len(base_rows)) if base_rows_first else slice(len(others), None)

    def answers(neighbours: list[tuple[str, str]]) -> object:
        rows = [*base_rows, *neighbours] if base_rows_first else [*neighbours, *base_rows]
        return [(a.token_ids, a.logprobs) for a in run(llm, tiny_golden, rows, params)[for_base]]

    assert answers(others) == answers(plain)


def test_a_seed_gives_the_same_text_whatever_the_batch(llm: LLM, tiny_golden: Golden) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, seed=11)
    rows = [(name, "0") for name in tiny_golden.outputs]
    together = run(llm, tiny_golden, rows, params)
    alone = [run(llm, tiny_golden, [row], params)[0] for row in rows]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_completions_of_one_request_differ_and_can_be_repeated(
    llm: LLM, tiny_golden: Golden
) -> None:
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=3)
    prompt = tiny_golden.prompts["0"].input_ids
    first, second = llm.generate([prompt, prompt], params)
    assert first.completions == second.completions
    assert [c.index for c in first.completions] == [0, 1, 2, 3]
    assert len({c.token_ids for c in first.completions}) > 1


def test_prompt_logprobs_equal_those_of_generation(llm: LLM, tiny_golden: Golden) -> None:
    """A prompt that ends in a golden answer has the golden likelihoods, chunked or not."""
    for name in tiny_golden.outputs:
        prompt, answer = tiny_golden.prompts["0"], tiny_golden.outputs[name]["0"]
        tokens = [*prompt.input_ids, *answer.output_ids]
        output = llm.generate(
            [tokens],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
            adapter=None if name == BASE else name,
        )[0]
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        tail = output.prompt_logprobs[len(prompt.input_ids) :]
        for entry, token, wanted in zip(tail, answer.output_ids, answer.logprobs, strict=True):
            assert entry is not None
            assert entry.token_id == token == entry.top[0][0]
            assert abs(entry.logprob - wanted) <= TOLERANCE


def test_unloaded_adapters_free_their_bytes_and_their_names(
    tiny_base: Path, tiny_adapters: dict[str, Path], tiny_golden: Golden
) -> None:
    llm = engine(tiny_base, tiny_adapters)
    rows = all_rows(tiny_golden)
    run(llm, tiny_golden, rows[:6])
    assert llm.stats().adapter_bytes > 0
    for name in tiny_adapters:
        llm.unload_adapter(name)
    assert llm.stats().adapter_bytes == 0
    assert llm.adapters() == []
    for name, path in tiny_adapters.items():
        llm.load_adapter(name, str(path))
    check(llm, tiny_golden, rows, TOLERANCE)


def test_bfloat16_keeps_the_likelihoods_of_strong_adapters(
    tiny_base: Path, tiny_adapters: dict[str, Path], tiny_golden: Golden
) -> None:
    llm = LLM(
        str(tiny_base),
        adapters={n: str(p) for n, p in tiny_adapters.items()},
        options=EngineOptions(model=ModelOptions(dtype="bfloat16")),
    )
    check_forced(llm, tiny_golden, all_rows(tiny_golden), BFLOAT16_TOLERANCE)


def test_lenience_serves_an_adapter_with_unknown_fields_and_says_so(
    tiny_base: Path,
    tiny_adapters: dict[str, Path],
    tiny_golden: Golden,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = shutil.copytree(tiny_adapters["cat"], tmp_path / "cat")
    config = source / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"gamma": 0.5}))
    with pytest.raises(AdapterRefused, match=r"--lenient.*gamma"):
        engine(tiny_base, {"cat": source})
    caplog.clear()
    options = EngineOptions(
        model=ModelOptions(dtype="float32"), adapters=AdapterOptions(lenient=True)
    )
    llm = LLM(str(tiny_base), adapters={"cat": str(source)}, options=options)
    [info] = llm.adapters()
    warning = "unknown field gamma in adapter_config.json is set, but ignored (lenient)"
    assert warning in info.warnings
    assert f"adapter 'cat': {warning}" in [r.getMessage() for r in caplog.records]
    check(llm, tiny_golden, [("cat", "0")], TOLERANCE)
