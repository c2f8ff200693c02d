"""A real model answers the same whether prompts are found in the prefix cache or computed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from peft import LoraConfig

from loramux import LLM, SamplingParams
from loramux.types import RequestOutput
from tests.cpu.architectures import VOCAB, build
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_own_values import TOKENS, Kind, config_of, save
from tests.cpu.test_run_ahead import answers, likelihoods

BLOCK = 16
KINDS = {
    "lora": Kind("llama", {}),
    "dora": Kind("llama", {"use_dora": True}),
    "tokens": Kind("llama", {"trainable_token_indices": TOKENS}),
    "norms": Kind("llama", {"modules_to_save": ["norm", "input_layernorm"], "lora_bias": True}),
}
MODELS = [None, *KINDS]
SYSTEM = [(i * 37 + 11) % VOCAB for i in range(3 * BLOCK)]
"""Three blocks that all prompts begin with; the first prompt has one token more."""
PROMPTS = [[*SYSTEM, *((i * 29 + j * 7 + 3) % VOCAB for i in range(1 + 9 * j))] for j in range(3)]
ROWS = [(prompt, model) for prompt in PROMPTS for model in MODELS]
PARAMS = {
    "greedy": [SamplingParams(temperature=0, max_tokens=20, logprobs=2)],
    "drawn": [SamplingParams(temperature=0.9, top_p=0.9, n=2, seed=5, max_tokens=20, logprobs=0)],
    "all kinds": [
        SamplingParams(temperature=0, max_tokens=20, logprobs=0),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3),
        SamplingParams(temperature=1, seed=1, max_tokens=20, min_tokens=4, stop=("7", "3")),
        SamplingParams(temperature=0.7, seed=2, max_tokens=3, prompt_logprobs=1),
    ],
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    for name, kind in KINDS.items():
        save(build("llama"), config_of(kind), folder / name)
    return {name: str(folder / name) for name in KINDS}


def engine(adapters: dict[str, str], **options: object) -> LLM:
    return LLM.over(assemble_tiny(build("llama"), **options), adapters)  # type: ignore[arg-type]


def ask(llm: LLM, kind: str) -> list[RequestOutput]:
    params = [PARAMS[kind][i % len(PARAMS[kind])] for i in range(len(ROWS))]
    return llm.generate([p for p, _ in ROWS], params, adapter=[model for _, model in ROWS])


def one(llm: LLM, model: str | None = None, cache_salt: str | None = None) -> int:
    """Tokens that one request finds."""
    params = SamplingParams(temperature=0, max_tokens=2)
    return llm.generate(PROMPTS[:1], params, adapter=model, cache_salt=cache_salt)[0].cached_tokens


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs-ahead"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_loras": 5, "max_step_tokens": 256, "kv_blocks": 128},
        {"max_loras": 5, "max_num_seqs": 5, "max_step_tokens": 11, "kv_blocks": 128},
        {"max_loras": 1, "max_num_seqs": 5, "max_step_tokens": 24, "kv_blocks": 11},
    ],
    ids=["room", "chunks", "tight"],
)
def test_answers_are_the_same_cold_and_warm_and_without_the_cache(
    kind: str, runs_ahead: bool, options: dict[str, int], adapters: dict[str, str]
) -> None:
    without = ask(engine(adapters, prefix_cache=False, **options), kind)
    llm = engine(adapters, runs_ahead=runs_ahead, **options)
    for temperature in ("cold", "warm"):
        outputs = ask(llm, kind)
        assert answers(outputs) == answers(without), temperature
        assert likelihoods(outputs) == pytest.approx(likelihoods(without), abs=1e-4)
    stats = llm.stats()
    assert (stats.preemptions > 0) == (options["kv_blocks"] == 11)
    if not stats.preemptions:  # there is room to keep all
        for (prompt, _), output in zip(ROWS, outputs, strict=True):
            computed = output.prompt_logprobs is not None
            expected = 0 if computed else (len(prompt) - 1) // BLOCK * BLOCK
            assert output.cached_tokens == expected
    assert stats.kv_blocks_used == 0
    assert 0 < stats.prefix_hits < stats.prefix_queries


def test_completions_share_their_prompt(adapters: dict[str, str]) -> None:
    llm = engine(adapters, max_step_tokens=128)
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4)
    [output] = llm.generate(PROMPTS[1:2], params, adapter="lora")
    assert output.cached_tokens == 0  # the first completion's
    assert llm.stats().prefix_hits == 3 * 3 * BLOCK
    assert llm.stats().prompt_tokens == len(PROMPTS[1]) + 3 * (len(PROMPTS[1]) - 3 * BLOCK)


def test_a_chat_goes_on_from_its_answer(adapters: dict[str, str]) -> None:
    llm = engine(adapters, max_step_tokens=128)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [first] = llm.generate(PROMPTS[:1], params, adapter="dora")
    longer = [*PROMPTS[0], *first.completions[0].token_ids, 5]
    [second] = llm.generate([longer], params, adapter="dora")
    assert second.cached_tokens == len(longer) // BLOCK * BLOCK == 4 * BLOCK
    fresh = engine(adapters, max_step_tokens=128, prefix_cache=False)
    [expected] = fresh.generate([longer], params, adapter="dora")
    assert answers([second]) == answers([expected])


def test_models_and_salts_find_only_their_own(adapters: dict[str, str]) -> None:
    llm = engine(adapters, max_loras=5, max_step_tokens=128)
    callers = [(model, salt) for model in MODELS for salt in (None, "x")]
    assert [one(llm, *caller) for caller in callers] == [0] * len(callers)
    assert [one(llm, *caller) for caller in callers] == [3 * BLOCK] * len(callers)


def test_new_weights_under_an_old_name_find_nothing(tmp_path: Path) -> None:
    def write(seed_rank: int) -> None:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        config = LoraConfig(r=seed_rank, target_modules=["q_proj"], task_type="CAUSAL_LM")
        save(build("llama"), config, tmp_path / "a")

    write(2)
    llm = engine({"a": str(tmp_path / "a")}, max_step_tokens=128)
    assert [one(llm, "a"), one(llm, "a")] == [0, 3 * BLOCK]
    write(4)
    llm.load_adapter("a", str(tmp_path / "a"), replace=True)
    assert [one(llm, "a"), one(llm, "a")] == [0, 3 * BLOCK]


def test_an_adapter_that_was_evicted_finds_its_blocks_again(adapters: dict[str, str]) -> None:
    plain = {name: adapters[name] for name in ("lora", "dora")}
    llm = engine(plain, max_loras=1, max_step_tokens=128)
    assert [one(llm, name) for name in ("lora", "dora", "lora")] == [0, 0, 3 * BLOCK]
    assert llm.stats().slot_evictions == 2
