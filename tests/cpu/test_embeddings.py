"""Vectors of a real model are those of transformers and PEFT, whoever shares the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from loramux import LLM, PoolingParams
from loramux.engine.build import Parts
from loramux.engine.embedding import Embedding
from loramux.engine.messages import pack, unpack
from loramux.errors import InvalidRequest, UnknownModel
from loramux.ops.attention import StepKind
from loramux.plan import HiddenPart, SequenceResult, SequenceStep, StepPlan
from loramux.scheduling.request import Request
from loramux.testing import tiny_model
from loramux.types import (
    Delta,
    EmbeddingRequest,
    EngineRequest,
    GenerationRequest,
    Pooling,
    RequestId,
    SamplingParams,
    numbers_of,
)
from loramux.worker import pooling
from loramux.worker.graphs import GraphKey
from tests.cpu.architectures import ARCHITECTURES, VOCAB, build, write_adapter
from tests.cpu.engines import assemble_tiny
from tests.cpu.served import ADAPTERS, BASE, TARGETS, part
from tests.cpu.test_compiled_layers import served
from tests.cpu.test_own_values import KINDS as OWN
from tests.cpu.test_own_values import Kind, save, write

PROMPTS = [[(29 * i + 7 * j + 3) % VOCAB for i in range(1 + 13 * j)] for j in range(4)]
"""Of 1 to 40 tokens; a step has 16."""
KINDS = {
    "lora": Kind("llama", {}),
    "dora": Kind("llama", {"use_dora": True}),
    "norms": OWN["norms"],
    "tokens": OWN["tokens"],
    "head": OWN["lora_on_head"],
}
TOLERANCE = 1e-4
"""Of a vector's length, in float32."""
MEANS: tuple[Pooling, ...] = ("last", "mean")


def states_of(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """``[T, hidden]``: what the head is given, seen at the head itself."""
    plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    seen: list[Tensor] = []
    hook = plain.get_output_embeddings().register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]))
    hook.remove()
    return seen[-1][0]


def vector_of(model: nn.Module, tokens: Sequence[int], params: PoolingParams) -> Tensor:
    states = states_of(model, tokens)
    vector = states[-1] if params.pooling == "last" else states.mean(dim=0)
    return nn.functional.normalize(vector, dim=0) if params.normalize else vector


def assert_close(found: Sequence[float], expected: Tensor) -> None:
    difference = torch.tensor(found) - expected
    assert float(difference.norm()) <= TOLERANCE * float(expected.norm())


def run(parts: Parts, requests: Sequence[EngineRequest]) -> list[list[Delta]]:
    """Run requests of any kind in one batch; the deltas of each."""
    deltas: dict[RequestId, list[Delta]] = {}
    for request in requests:
        sequences = parts.admission.admit(request)
        parts.core.add(sequences)
        deltas[sequences[0].parent_id] = []
    while parts.core.has_work:
        for delta in parts.core.step():
            deltas[delta.request_id].append(delta)
    parts.core.check()
    return list(deltas.values())


def answer(model: str | None, prompt: Sequence[int]) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    return GenerationRequest(prompt_token_ids=prompt, params=params, model=model)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    return {None: build("llama")} | {n: write(kind, folder / n) for n, kind in KINDS.items()}


@pytest.fixture(scope="module")
def folder(oracles: dict[str | None, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "adapters0"


def engine(folder: Path, **options: Any) -> Parts:
    parts = assemble_tiny(build("llama"), **({"max_loras": 6} | options))
    LLM.over(parts, {name: str(folder / name) for name in KINDS})
    return parts


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["waits", "runs-ahead"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 5, "max_loras": 2, "kv_blocks": 8}, {"max_step_tokens": 300}],
    ids=["chunks", "tight", "at once"],
)
def test_vectors_are_those_of_peft_beside_rows_that_generate(
    oracles: dict[str | None, Any], folder: Path, options: dict[str, Any], runs_ahead: bool
) -> None:
    parts = engine(folder, runs_ahead=runs_ahead, **options)
    kinds = [PoolingParams(pooling=p, normalize=n) for p in MEANS for n in (True, False)]
    asked = [
        (model, prompt, kinds[(i + j) % len(kinds)])
        for i, model in enumerate(oracles)
        for j, prompt in enumerate(PROMPTS)
    ]
    requests: list[EngineRequest] = []
    for model, prompt, params in asked:
        requests.append(EmbeddingRequest(prompt_token_ids=prompt, params=params, model=model))
        requests.append(answer(model, prompt))

    found = run(parts, requests)

    for (model, prompt, params), [delta] in zip(asked, found[::2], strict=True):
        assert delta.embedding is not None
        assert_close(numbers_of(delta.embedding), vector_of(oracles[model], prompt, params))
    for (model, prompt, _), deltas in zip(asked, found[1::2], strict=True):
        tokens = [token for delta in deltas for token in delta.token_ids]
        with torch.inference_mode():
            logits = oracles[model](input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
        likelihoods = logits[len(prompt) - 1 : -1].log_softmax(-1)
        for row, delta in zip(likelihoods, deltas, strict=True):
            [entry] = delta.logprobs
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
    assert (parts.core.stats().preemptions > 0) == ("kv_blocks" in options)


def test_what_is_found_computed_gives_the_same_vectors(
    oracles: dict[str | None, Any], folder: Path
) -> None:
    llm = LLM.over(engine(folder))
    for _ in range(2):
        for pooling_ in MEANS:
            params = PoolingParams(pooling=pooling_)
            vectors = llm.embed([PROMPTS[3]] * len(oracles), params, adapter=list(oracles))
            for model, vector in zip(oracles.values(), vectors, strict=True):
                assert_close(vector, vector_of(model, PROMPTS[3], params))
    assert llm.stats().prefix_hits >= len(oracles) * 32


def test_rows_that_generate_keep_every_bit(folder: Path) -> None:
    """Steps of as many rows, with and without rows that are pooled."""
    alike = [answer(None, PROMPTS[1]) for _ in range(2)]
    results = []
    for others in (
        [answer(None, PROMPTS[2])],
        [EmbeddingRequest(prompt_token_ids=PROMPTS[2], params=PoolingParams(pooling="mean"))],
    ):
        parts = engine(folder, prefix_cache=False, max_step_tokens=64)
        found = run(parts, [*alike, *others])[:2]
        results.append([[(d.token_ids, d.logprobs) for d in deltas[:1]] for deltas in found])
    assert results[0] == results[1]


def test_adapters_change_vectors(oracles: dict[str | None, Any]) -> None:
    """Otherwise equal vectors would say nothing."""
    base = vector_of(oracles[None], PROMPTS[2], PoolingParams())
    for name in ("lora", "dora", "norms", "tokens"):
        other = vector_of(oracles[name], PROMPTS[2], PoolingParams())
        assert float((other - base).norm()) > 0.05


def test_one_call_embeds_texts_and_tokens(folder: Path) -> None:
    llm = LLM.over(engine(folder))
    texts = llm.embed(["7 12 3", "5"], adapter=["lora", None])
    tokens = llm.embed([[7, 12, 3], [5]], adapter=["lora", None])
    assert texts == tokens
    assert [math.hypot(*vector) for vector in texts] == pytest.approx([1, 1], abs=1e-6)
    [alone] = llm.embed("5")
    assert alone == pytest.approx(tokens[1], abs=1e-6)
    assert llm.embed([]) == []


def test_a_refused_prompt_embeds_nothing(folder: Path) -> None:
    llm = LLM.over(engine(folder))
    with pytest.raises(UnknownModel):
        llm.embed([[1], [2]], adapter=[None, "nobody"])
    with pytest.raises(InvalidRequest, match="empty"):
        llm.embed([[1], []])
    assert llm.stats().num_steps == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_shows_what_its_head_is_given(name: str, tmp_path: Path) -> None:
    oracle = write_adapter(name, build(name), tmp_path / "a")
    llm = LLM.over(assemble_tiny(build(name)), {"a": str(tmp_path / "a")})
    params = PoolingParams(normalize=False)
    vectors = llm.embed(PROMPTS[2:], params, adapter=[None, "a"])
    for model, prompt, vector in zip((build(name), oracle), PROMPTS[2:], vectors, strict=True):
        assert_close(vector, vector_of(model, prompt, params))


def asks(tokens: Sequence[int], slot: int, block: int, hidden: HiddenPart) -> SequenceStep:
    whole = part(tokens, slot, blocks=[block])
    return whole._replace(sample=None, prompt_logprobs=None, next_prompt_tokens=(), hidden=hidden)


class Replays:
    """Graphs of 16 and 64 rows that compute at each replay what a GPU would have captured."""

    def __init__(self, compute: Callable[[GraphKey], Tensor]) -> None:
        self._compute = compute
        self.kinds: list[StepKind] = []

    def bucket_of(self, kind: StepKind, num_rows: int) -> int:
        return 16 if num_rows <= 16 else 64

    def replay(self, key: GraphKey) -> Tensor:
        self.kinds.append(key.kind)
        return self._compute(key)


@pytest.mark.parametrize("captured", [False, True], ids=["computed", "replayed"])
def test_compiled_layers_give_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    torch._dynamo.reset()
    model = served(tmp_path, CompileCounter())
    config = LoraConfig(
        r=4, target_modules=list(TARGETS), task_type="CAUSAL_LM", modules_to_save=["norm"]
    )
    save(tiny_model(), config, tmp_path / "own")
    model.add_saved("own")
    runner: Any = model.worker._runner
    replays = Replays(runner._compute)
    if captured:
        monkeypatch.setattr(runner, "_graphs", replays)
        monkeypatch.setattr(runner, "_later", SimpleNamespace(is_there=lambda key: True))
        states = torch.zeros(64, model.base.hidden_size)
        monkeypatch.setattr(runner, "_kept_states", states, raising=False)
    prompt = PROMPTS[1][:7]
    for names in (ADAPTERS, (*ADAPTERS[:2], "own")):
        model.worker.apply([model.load(slot, name) for slot, name in enumerate(names)])
        rows: list[tuple[int, HiddenPart]] = [
            (slot, hidden) for slot in (BASE, 0, 1, 2) for hidden in ("last", "sum")
        ]
        steps = [asks(prompt, slot, i, hidden) for i, (slot, hidden) in enumerate(rows)]
        generating = part(prompt, 0, blocks=[20])
        plan = StepPlan((), (*steps[:3], generating, *steps[3:]))
        results = {r.request_id: r for r in model.worker.launch(plan).result().sequences}
        assert results[generating.request_id].token_id is not None
        for (slot, hidden), step in zip(rows, steps, strict=True):
            name = None if slot == BASE else names[slot]
            oracle: nn.Module = tiny_model()
            if name is not None:
                oracle = PeftModel.from_pretrained(oracle, str(tmp_path / name)).eval()  # type: ignore[arg-type]
            states = states_of(oracle, prompt)
            expected = states[-1] if hidden == "last" else states.sum(dim=0)
            found = results[step.request_id].hidden
            assert found is not None
            assert_close(numbers_of(found), expected)
    # An adapter with a norm of its own is in none.
    assert replays.kinds == ([StepKind.MIXED] if captured else [])


def test_a_sum_in_bfloat16_is_made_in_float32() -> None:
    states = torch.ones(1000, 3, dtype=torch.bfloat16)
    [result] = pooling.launch(states, [asks([0] * 1000, 0, 0, "sum")]).result().values()
    assert result.hidden is not None
    assert numbers_of(result.hidden) == [1000.0] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("hidden", ["last", "sum"])
def test_states_that_are_not_finite_fail_their_own_sequence(bad: float, hidden: HiddenPart) -> None:
    states = torch.ones(6, 3)
    states[2, 1] = bad
    sequences = [asks([0] * 3, 0, i, hidden) for i in range(2)]
    failed, sound = pooling.launch(states, sequences).result().values()
    assert failed == pooling.Pooled(error="the hidden states are not finite")
    assert sound.error is None


def test_a_vector_of_zeros_stays_one() -> None:
    params = PoolingParams()
    request = Request(RequestId("r"), RequestId("r"), 0, params, 0, None, [1], 1, 2, None)
    delta = Embedding(request, params).push(
        SequenceResult(RequestId("r"), hidden=bytes(8)), start=0, end=1
    )
    assert delta is not None
    assert delta.embedding == bytes(8)


def test_a_delta_can_be_made_again_from_its_fields() -> None:
    """As the engine's process sends it."""
    delta = Delta(RequestId("r"), 0, "", (), finish_reason="stop", embedding=b"1234")
    assert unpack(pack([delta])) == [delta]
