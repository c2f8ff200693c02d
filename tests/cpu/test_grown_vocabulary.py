"""Adapters with more tokens than the base: as PEFT computes them, beside all others in a batch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from typer.testing import CliRunner

from loramux import LLM, SamplingParams
from loramux.cli.main import app
from loramux.errors import AdapterRefused, InvalidRequest
from loramux.types import RequestOutput
from tests.cpu.architectures import VOCAB, build
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_own_values import (
    Kind,
    assert_right,
    base_of,
    bits,
    config_of,
    likelihoods,
    save,
)
from tests.cpu.test_own_values import write as write_alike

GROWN = VOCAB + 5
WIDER = VOCAB + 140
"""Beyond the next power of two, where the arithmetic of a draw has another unit."""
NEW_TOKENS = 6
PROMPTS = [[5, 161, 31, 164], [(i * 37 + 11) % GROWN for i in range(21)]]
"""Of the grown vocabulary; ``BASE_PROMPTS`` are of the base's."""
BASE_PROMPTS = [[5, 77, 31, 9], [(i * 37 + 11) % VOCAB for i in range(21)]]
SAVED = {"modules_to_save": ["embed_tokens", "lm_head"]}

KINDS = {
    "unasked": Kind("llama", {}),
    "modules_to_save": Kind("llama", SAVED),
    "one_of_them_saved": Kind("llama", {"modules_to_save": ["lm_head"]}),
    "tied_unasked": Kind("llama", {}, tied=True),
    "tied_embedding_saved": Kind("llama", {"modules_to_save": ["embed_tokens"]}, tied=True),
    "tied_and_ensured": Kind(
        "llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, tied=True
    ),
    "tied_both_saved": Kind("llama", SAVED, tied=True),
    "scaled_and_soft_capped": Kind("gemma2", SAVED),
    "scaled_tied": Kind("gemma3_text", {}, tied=True),
    "scaled_logits": Kind("granite", SAVED),
    "bias_of_head": Kind("phi", SAVED),
    "bias_of_head_unasked": Kind("phi", {}),
    "conv1d": Kind("gpt2", {"modules_to_save": ["wte", "lm_head"]}),
    "tokens": Kind("llama", {"trainable_token_indices": [164, 5, 161]}),
    "tokens_tied": Kind("llama", {"trainable_token_indices": [164, 5, 161]}, tied=True),
    "tokens_of_head": Kind("llama", {"trainable_token_indices": {"lm_head": [164, 5]}}),
    "beside_biases": Kind("llama_bias", {"bias": "all", **SAVED}),
    "beside_dora": Kind("llama", {"use_dora": True, **SAVED}),
}


def resized(kind: Kind, vocab_size: int) -> PreTrainedModel:
    model = base_of(kind)
    torch.manual_seed(3)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    generator = torch.Generator().manual_seed(5)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for end in {id(m.weight): m for m in (head, embedding)}.values():
        with torch.no_grad():  # rows so strong that they are drawn
            new = end.weight[VOCAB:]
            noise = torch.randn(new.shape, generator=generator)
            new.copy_(noise * end.weight[:VOCAB].std() * 1.6)
    return model


def write(kind: Kind, folder: Path, vocab_size: int = GROWN) -> nn.Module:
    """Save a random adapter on a resized base; what PEFT makes of it when it is loaded again."""
    save(resized(kind, vocab_size), config_of(kind), folder, save_embedding_layers=True)
    # Rows that the file does not say would be these, which no adapter was trained with.
    other = base_of(kind)
    other.resize_token_embeddings(vocab_size, mean_resizing=False)
    return PeftModel.from_pretrained(other, str(folder)).eval()


def ask(
    llm: LLM, names: list[str | None], prompts: list[list[int]], **params: Any
) -> list[RequestOutput]:
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": 0, "ignore_eos": True, **params}
    )
    return llm.generate(prompts, sampling, adapter=names)


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_peft_and_the_base_keeps_its_own(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    oracle = write(kind, tmp_path / "grown")
    plain = Kind(kind.architecture, {}, tied=kind.tied)
    plain_oracle, base = write_alike(plain, tmp_path / "plain"), base_of(kind)
    # What the cache finds would have been computed in other steps.
    llm = LLM.over(assemble_tiny(base_of(kind), prefix_cache=False))
    names: list[str | None] = ["grown", "grown", None, None, "plain", "grown"]
    prompts = [*PROMPTS, *BASE_PROMPTS, BASE_PROMPTS[0], BASE_PROMPTS[1]]
    before = bits(ask(llm, [None] * 6, [*BASE_PROMPTS, *BASE_PROMPTS, *BASE_PROMPTS]))
    for adapter in ("grown", "plain"):
        llm.load_adapter(adapter, str(tmp_path / adapter))

    outputs = ask(llm, names, prompts)

    oracles = {"grown": oracle, "plain": plain_oracle, None: base}
    for output in outputs:
        assert_right(output, oracles[output.adapter])
    assert bits(outputs[2:4]) == before[2:4]
    spread = likelihoods(oracle, PROMPTS[1])
    assert spread.shape[1] == GROWN


def test_added_tokens_are_drawn(tmp_path: Path) -> None:
    write(KINDS["modules_to_save"], tmp_path / "grown", WIDER)
    llm = LLM.over(assemble_tiny(build("llama")), {"grown": str(tmp_path / "grown")})
    [output] = ask(llm, ["grown"], [BASE_PROMPTS[0]], max_tokens=40, temperature=1.0, seed=1)
    assert max(output.completions[0].token_ids) >= VOCAB


FILTERS = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 3.0, "top_k": 150},
    {"temperature": 3.0, "top_k": 162},
    {"temperature": 3.0, "top_p": 0.97},
    {"temperature": 3.0, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 90, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 3.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 12},
]


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The base, a plain adapter, and two of larger vocabularies."""
    folder = tmp_path_factory.mktemp("company")
    write(KINDS["modules_to_save"], folder / "grown")
    write(KINDS["unasked"], folder / "wider", WIDER)
    write_alike(Kind("llama", {}), folder / "plain")
    names = ("grown", "wider", "plain")
    # What the cache finds would have been computed in other steps.
    parts = assemble_tiny(build("llama"), max_step_tokens=64, prefix_cache=False)
    return LLM.over(parts, {name: str(folder / name) for name in names})


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("name", [None, "plain", "grown"])
def test_wider_company_changes_no_token_and_no_bit(
    company: LLM, name: str | None, params: dict[str, Any]
) -> None:
    """The rows stand where they stood, beside others of their own kind."""
    prompt = BASE_PROMPTS[0]
    more = {"max_tokens": 24, "logprobs": 5, "prompt_logprobs": 3, "seed": 11, **params}
    alone = ask(company, [name] * 3, [prompt] * 3, **more)
    mixed = ask(company, [name, "wider", name], [prompt] * 3, **more)

    size = {None: VOCAB, "plain": VOCAB, "grown": GROWN}[name]
    for before, after in ((alone[0], mixed[0]), (alone[2], mixed[2])):
        assert after.completions[0].token_ids == before.completions[0].token_ids
        assert _told(after) == pytest.approx(_told(before), abs=1e-5)
        tops = [*after.completions[0].logprobs, *(after.prompt_logprobs or ())]
        told = {token for entry in tops if entry is not None for token, _ in entry.top}
        assert max(told) < size
        assert max(after.completions[0].token_ids) < size
        # Log-probabilities are of the row's own vocabulary: the best five are not lessened.
        assert all(len(entry.top) == 5 for entry in after.completions[0].logprobs)


def _told(output: RequestOutput) -> list[float]:
    entries = [*output.completions[0].logprobs, *(output.prompt_logprobs or ())]
    return [
        value
        for entry in entries
        if entry is not None
        for value in (entry.logprob, *(value for _, value in entry.top))
    ]


def test_base_rows_keep_every_bit_of_sampled_answers_beside_a_wider_adapter(
    company: LLM,
) -> None:
    """A batch of the same sizes with the base in the adapter's place."""
    more = {"max_tokens": 16, "logprobs": 4, "temperature": 1.5, "top_p": 0.95, "seed": 3}
    prompts = [BASE_PROMPTS[1], BASE_PROMPTS[0], BASE_PROMPTS[0]]
    before = ask(company, [None, None, None], prompts, **more)
    after = ask(company, [None, "wider", None], prompts, **more)
    for i in (0, 2):
        assert after[i].completions == before[i].completions


@pytest.mark.parametrize("name", [None, "plain", "grown"])
def test_tokens_of_another_vocabulary_are_refused(company: LLM, name: str | None) -> None:
    size = {None: VOCAB, "plain": VOCAB, "grown": GROWN}[name]
    ask(company, [name], [[size - 1]])
    with pytest.raises(InvalidRequest, match=f"token id {size} is not in 0 … {size - 1}"):
        ask(company, [name], [[size]])
    with pytest.raises(InvalidRequest, match="token id"):
        ask(company, [name], [[1]], stop_token_ids=(size,))


def test_a_failed_row_hands_no_foreign_token_on(tmp_path: Path) -> None:
    """Where steps run ahead, the next one reads a token before its row is known to have failed."""
    write(KINDS["modules_to_save"], tmp_path / "grown", WIDER)
    model = build("llama")
    weight = model.get_input_embeddings().weight
    parts = assemble_tiny(model, max_step_tokens=64, runs_ahead=True)
    llm = LLM.over(parts, {"grown": str(tmp_path / "grown")})
    with torch.no_grad():
        weight[7] = torch.nan
    for seed in range(8):
        outputs = llm.generate(
            [[5, 7], [5, 161], [5, 6]],
            SamplingParams(temperature=1.0, seed=seed, max_tokens=4, ignore_eos=True),
            adapter=[None, "grown", None],
        )
        reasons = [output.completions[0].finish_reason for output in outputs]
        assert reasons == ["error", "length", "length"]


@dataclass(frozen=True)
class Fault:
    """A change to the tensors of a good adapter, and words of the refusal."""

    change: dict[str, tuple[int, ...] | None]
    words: str
    tied: bool = False
    config: dict[str, Any] | None = None


EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
FAULTS = {
    "embedding alone": Fault({HEAD: None}, "does not hold all of it"),
    "head alone": Fault({EMBEDDING: None}, "does not hold all of it"),
    "head of the base's": Fault({HEAD: (VOCAB, 32)}, "both alike"),
    "fewer": Fault({EMBEDDING: (VOCAB - 1, 32), HEAD: (VOCAB - 1, 32)}, "both alike"),
    "two sizes": Fault({HEAD: (GROWN + 1, 32)}, "both alike"),
    "far too many": Fault(
        {EMBEDDING: (2 * VOCAB + 1, 32), HEAD: (2 * VOCAB + 1, 32)}, "at most 320"
    ),
    "other width": Fault({EMBEDDING: (GROWN, 33)}, "is expected"),
    "no matrix": Fault({EMBEDDING: (GROWN,)}, "is expected"),
    "tied, and saved for one side": Fault(
        {HEAD: None},
        "does not hold all of it",
        tied=True,
        config={"modules_to_save": ["embed_tokens"]},
    ),
    "stray copy": Fault(
        {"base_model.model.lm_head.original_module.weight": (GROWN, 32), HEAD: None},
        "original_module",
    ),
    "copy of another size": Fault(
        {"base_model.model.lm_head.original_module.weight": (GROWN + 1, 32)}, "is expected"
    ),
    "LoRA as well": Fault(
        {
            "base_model.model.lm_head.lora_A.weight": (4, 32),
            "base_model.model.lm_head.lora_B.weight": (GROWN, 4),
        },
        "LoRA on an embedding or lm_head with more",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_certain_is_refused(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    kind = Kind("llama", fault.config or {}, tied=fault.tied)
    write(Kind("llama", {}, tied=fault.tied), tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    for key, shape in fault.change.items():
        tensors.pop(key, None)
        if shape is not None:
            tensors[key] = torch.randn(shape)
    save_file(tensors, path)
    if kind.config:
        config = tmp_path / "a" / "adapter_config.json"
        text = config.read_text().replace(
            '"modules_to_save": null', '"modules_to_save": ["embed_tokens"]'
        )
        config.write_text(text)
    llm = LLM.over(assemble_tiny(base_of(kind)))
    with pytest.raises(AdapterRefused, match=fault.words):
        llm.load_adapter("a", str(tmp_path / "a"))


@pytest.mark.parametrize("name", ["modules_to_save", "bias_of_head", "tokens_tied"])
def test_inspecting_tells_the_vocabulary_and_the_size(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    write(kind, tmp_path / "grown")
    base_of(kind).save_pretrained(tmp_path / "base")
    llm = LLM.over(assemble_tiny(base_of(kind)))
    info = llm.load_adapter("grown", str(tmp_path / "grown"))
    arguments = ["inspect", str(tmp_path / "grown"), "--base", str(tmp_path / "base")]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (found["verdict"], found["vocab_size"], info.vocab_size) == ("serveable", GROWN, GROWN)
    assert found["bytes"]["block"] == info.num_bytes
    assert f"{GROWN} tokens, more than the base's" in CliRunner().invoke(app, arguments).stdout
    alone = json.loads(CliRunner().invoke(app, [*arguments[:2], "--json"]).stdout)
    assert (alone["verdict"], alone["vocab_size"]) == ("serveable", None)


def test_copies_that_do_not_count_are_told_of(tmp_path: Path) -> None:
    write(KINDS["modules_to_save"], tmp_path / "grown")
    llm = LLM.over(assemble_tiny(build("llama")))
    info = llm.load_adapter("grown", str(tmp_path / "grown"))
    assert any("PEFT does not go by" in warning for warning in info.warnings)
