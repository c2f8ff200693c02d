"""Compiled and captured steps on a GPU: right for adapters that no graph was captured with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import triton
from peft import LoraConfig, PeftModel
from torch._dynamo.utils import counters

from loramux import LLM, SamplingParams
from loramux.engine.build import Parts
from loramux.testing import random_adapter, tiny_model
from loramux.types import RequestOutput
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import TARGETS
from tests.cpu.test_own_values import save

PROMPTS = [[(29 * i + 7 * j + 3) % 160 for i in range(3 + 9 * j)] for j in range(5)]
RANKS = {"plain": 8, "odd": 3, "large": 40, "larger": 100, "dora": 8, "narrow": 16}
TOLERANCE = 0.25
"""Of a log-probability, in bfloat16 against float32; an adapter changes them by several."""


def model(dtype: str) -> torch.nn.Module:
    return tiny_model(
        hidden_size=256, intermediate_size=384, num_layers=3, dtype=dtype, bias=True
    )  # heads of 64


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    layout = assemble(max_loras=1).worker.layout
    return {
        name: random_adapter(
            folder / name,
            layout,
            rank=rank,
            # Some modules of a fused linear stay as they are.
            targets=("q_proj", "v_proj", "down_proj") if name == "narrow" else TARGETS,
            seed=seed,
            dora=name == "dora",
            alpha=rank / 2,
        )
        for seed, (name, rank) in enumerate(RANKS.items())
    }


def assemble(
    *,
    max_loras: int,
    max_num_seqs: int = 16,
    kv_blocks: int | None = 256,
    prefix_cache: bool = False,
) -> Parts:
    """Without the prefix cache, so that the same requests take the same steps each time."""
    return assemble_tiny(
        model("bfloat16").cuda(),  # type: ignore[arg-type]
        max_loras=max_loras,
        max_num_seqs=max_num_seqs,
        max_step_tokens=128,
        kv_blocks=kv_blocks,
        device_cache="64MiB",
        host_cache="256MiB",
        prefix_cache=prefix_cache,
    )


def generate(llm: LLM, names: Sequence[str | None], *, max_tokens: int = 12) -> list[RequestOutput]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    return llm.generate(prompts, params, adapter=list(names))


def assert_right(outputs: Sequence[RequestOutput], adapters: dict[str, Path]) -> None:
    """Each chosen token is as likely as PEFT says in float32 after the very same tokens.

    Where PEFT itself is off in bfloat16, as much more is allowed.
    """
    for output in outputs:
        directory = None if output.adapter is None else adapters[output.adapter]
        answer = output.completions[0]
        exact, rounded = (
            peft_likelihoods(directory, output.prompt_token_ids, answer.token_ids, dtype)
            for dtype in ("float32", "bfloat16")
        )
        for i, entry in enumerate(answer.logprobs):
            allowed = TOLERANCE + abs(rounded[i] - exact[i])
            assert abs(entry.logprob - exact[i]) < allowed, (output.adapter, i)


def peft_likelihoods(
    directory: Path | None, prompt: Sequence[int], answer: Sequence[int], dtype: str
) -> list[float]:
    """Log-probability of each token of an answer."""
    plain = model(dtype)
    if directory is not None:
        plain = PeftModel.from_pretrained(plain, str(directory)).eval()  # type: ignore[arg-type]
    with torch.inference_mode():
        logits = plain(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    logprobs = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs[torch.arange(len(answer)), list(answer)].tolist()


def likelihoods(outputs: Sequence[RequestOutput]) -> list[list[float]]:
    return [[e.logprob for e in output.completions[0].logprobs] for output in outputs]


@pytest.fixture(scope="module")
def llm(adapters: dict[str, Path]) -> LLM:
    return LLM.over(assemble(max_loras=4), {name: str(path) for name, path in adapters.items()})


@pytest.fixture(scope="module")
def roomy(adapters: dict[str, Path]) -> LLM:
    """With a slot for every adapter, which are more than few."""
    parts = assemble(max_loras=len(RANKS))
    return LLM.over(parts, {name: str(path) for name, path in adapters.items()})


@pytest.mark.parametrize(
    "names",
    [
        [None, None, None],
        ["plain", "odd", None, "plain"],
        ["large", "plain", None, "narrow", "odd", "large"],
        ["larger", None, "plain"],
        ["dora", "plain", None, "larger"],
        ["plain"],
        [None],
        [*RANKS, None] * 3,  # more adapters than slots, more requests than fit
    ],
    ids=str,
)
def test_answers_are_those_of_peft(
    llm: LLM, adapters: dict[str, Path], names: list[str | None]
) -> None:
    assert_right(generate(llm, names), adapters)


@pytest.mark.parametrize(
    "names",
    [
        ["plain", "odd", "narrow", "large", "larger", None, "plain"],  # many adapters
        ["odd", "narrow", "plain", None, "odd"],  # few of many slots
        [*RANKS, None, "plain"],  # many, DoRA among them
    ],
    ids=str,
)
def test_many_adapters_and_few_of_many_slots_answer_as_peft_does(
    roomy: LLM, adapters: dict[str, Path], names: list[str | None]
) -> None:
    assert_right(generate(roomy, names), adapters)


def test_no_step_waits_for_a_compiler(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is compiled at start, whatever adapters come; and a graph changes no bit of a step."""
    own = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm", "lm_head"])
    save(model("float32"), own, tmp_path / "own")  # type: ignore[arg-type]
    sources = {name: str(path) for name, path in {**adapters, "own": tmp_path / "own"}.items()}
    parts = assemble(max_loras=8)
    llm = LLM.over(parts, sources)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name)
    )
    graphs = counters["stats"]["unique_graphs"]
    mixes = ([*RANKS, None] * 2, ["large", "dora"], ["own", "narrow"], [*RANKS], ["larger"], [None])
    before = [likelihoods(generate(llm, names)) for names in mixes]
    while parts.core.use_spare_time():
        pass
    assert [likelihoods(generate(llm, names)) for names in mixes] == before
    assert compiled == []
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_base_rows_keep_every_bit_beside_adapters(llm: LLM) -> None:
    alone = likelihoods(generate(llm, [None] * 10))
    beside = likelihoods(generate(llm, [None, "plain", None, "large", None, "odd", *[None] * 4]))
    for row in (0, 2, 4, 6, 7, 8, 9):
        assert beside[row] == alone[row]


def test_a_mix_gives_the_same_bits_every_time(llm: LLM) -> None:
    names = ["plain", None, "odd", "large", "narrow", "plain", None]
    first = generate(llm, names)
    for _ in range(100):
        again = generate(llm, names)
        assert likelihoods(again) == likelihoods(first)
        assert [o.completions[0].token_ids for o in again] == [
            o.completions[0].token_ids for o in first
        ]


def test_sampled_tokens_do_not_hang_on_company(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=8, ignore_eos=True)
    one, two = (
        llm.generate([PROMPTS[1]] * 3, params, adapter=["plain", other, None])[0]
        for other in ("odd", "large")
    )
    assert one.completions[0].token_ids == two.completions[0].token_ids


def test_preempted_requests_end_as_the_others(adapters: dict[str, Path]) -> None:
    parts = assemble(max_loras=2, kv_blocks=9, max_num_seqs=8)
    tight = LLM.over(parts, {name: str(adapters[name]) for name in ("plain", "odd")})
    outputs = generate(tight, ["plain", "odd", None, "plain", None, "odd"], max_tokens=20)
    assert tight.stats().preemptions > 0
    assert_right(outputs, adapters)


def test_sequences_that_share_blocks_answer_as_peft_does(adapters: dict[str, Path]) -> None:
    """Their tables name more blocks than the cache has; a warm first step is one token for each."""
    parts = assemble(max_loras=2, max_num_seqs=64, kv_blocks=160, prefix_cache=True)
    llm = LLM.over(parts, {name: str(adapters[name]) for name in ("plain", "dora")})
    prompt = [(29 * i + 3) % 160 for i in range(97)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    names = ["plain", None, "dora", None] * 16
    for _ in ("cold", "warm"):
        outputs = llm.generate([prompt] * len(names), params, adapter=names)
        assert_right(outputs[-4:], adapters)
    assert [output.cached_tokens for output in outputs] == [96] * len(names)
    assert llm.stats().preemptions == 0
