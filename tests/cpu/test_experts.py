"""LoRA on experts and routers, against weights with the deltas added."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from loramux import LLM, SamplingParams
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.inspected import ReferenceBase
from loramux.adapters.inspection import inspect_adapter
from loramux.adapters.loaded import LoadedAdapter
from loramux.errors import AdapterRefused, ModelNotServable
from loramux.lora.experts import AdaptedExperts
from loramux.lora.weights import packed_bytes
from loramux.model.blueprint import draw
from loramux.model.merge import fold
from loramux.ops.layout import pad
from loramux.types import RequestOutput
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_own_values import save

VOCAB, HIDDEN, SIZE, EXPERTS = 160, 32, 24, 4
TOLERANCE = 1e-3
PROMPTS = [[5, 77, 31], [(i * 37 + 11) % VOCAB for i in range(19)], [9], [8, 8, 50, 2]]

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "Qwen2MoeConfig": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 40},
    "MixtralConfig": {"num_local_experts": EXPERTS, "intermediate_size": SIZE},
    "OlmoeConfig": {"num_experts": EXPERTS, "intermediate_size": SIZE},
    "GptOssConfig": {
        "num_local_experts": EXPERTS, "intermediate_size": SIZE, "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    },
    "DeepseekV3Config": {
        "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_hidden_layers": 3,
    },
}  # fmt: skip

Weights = Mapping[str, tuple[Tensor, Tensor]]
"""A ``[rank, in]`` and B ``[out, rank]`` by the adapter's name of a module."""


def build(family: str, *, num_layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(11)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48,
        "moe_intermediate_size": SIZE, "num_hidden_layers": num_layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, family)(**{**sizes, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "experts" in name or name.endswith(("gate.weight", "router.weight", "sinks")):
            parameter.data.normal_(std=0.3)
    return model


def experts_of(model: PreTrainedModel) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(".experts")]


def drawn(shape: tuple[int, int], rank: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, shape[0], generator=generator) * shape[0] ** -0.5
    return a, torch.randn(shape[1], rank, generator=generator) * rank**-0.5


def per_expert(
    model: PreTrainedModel,
    leaves: Sequence[str],
    experts: Sequence[int],
    ranks: Sequence[int],
    *,
    sizes: tuple[int, int] = (HIDDEN, SIZE),
    seed: int = 0,
) -> Weights:
    """Deltas on these projections of these experts of every layer; the ranks take turns."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name in experts_of(model):
        for expert in experts:
            for leaf in leaves:
                shape = sizes[::-1] if leaf == "down_proj" else sizes
                rank = ranks[len(found) % len(ranks)]
                found[f"{name}.{expert}.{leaf}"] = drawn(shape, rank, seed + len(found))
    return found


def write(folder: Path, weights: Weights, **config: Any) -> None:
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in weights.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    ranks = {name: len(a) for name, (a, _) in weights.items()}
    alphas = {name: 2 * rank for name, rank in ranks.items()}
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": []}
    said |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    (folder / "adapter_config.json").write_text(json.dumps(said | config))


def view(model: PreTrainedModel, module: str) -> Tensor:
    """The weight of one projection of one expert, or of a router."""
    experts, _, rest = module.rpartition(".experts.")
    if not experts:
        return model.get_submodule(module).weight.data  # type: ignore[union-attr, return-value]
    expert, leaf = rest.split(".")
    holder: Any = model.get_submodule(f"{experts}.experts")
    whole = holder.down_proj if leaf == "down_proj" else holder.gate_up_proj
    weight = whole.data[int(expert)]
    if holder.is_transposed:
        weight = weight.t()
    if leaf == "down_proj":
        return weight
    if holder.is_concatenated:
        return weight[:SIZE] if leaf == "gate_proj" else weight[SIZE:]
    return weight[0::2] if leaf == "gate_proj" else weight[1::2]


def with_deltas(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    merged = copy.deepcopy(model)
    for module, (a, b) in weights.items():
        view(merged, module).add_(2 * b @ a)
    return merged


def trained_by_peft(model: PreTrainedModel, config: LoraConfig, folder: Path) -> torch.nn.Module:
    """Save an adapter that PEFT makes; what it makes of that when it is loaded again."""
    save(copy.deepcopy(model), config, folder)
    return PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()


def ask(
    llm: LLM,
    names: Sequence[str | None],
    *,
    prompts: Sequence[list[int]] = PROMPTS,
    max_tokens: int = 10,
) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    return llm.generate(
        [prompts[i % len(prompts)] for i in range(len(names))], params, adapter=list(names)
    )


def check(outputs: Sequence[RequestOutput], models: Mapping[str | None, torch.nn.Module]) -> None:
    """Each token is the likeliest, and as likely as the model that it is for says."""
    for output in outputs:
        answer = output.completions[0]
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        with torch.inference_mode():
            logits = models[output.adapter](input_ids=torch.tensor([tokens])).logits[0]
        rows = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        wanted = rows[torch.arange(len(rows)), list(answer.token_ids)]
        found = torch.tensor([entry.logprob for entry in answer.logprobs])
        assert (found - wanted).abs().max() < TOLERANCE, output.adapter
        assert (rows.max(-1).values - wanted).max() < TOLERANCE, output.adapter


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_with_the_deltas_in_its_weights(
    family: str, tmp_path: Path
) -> None:
    model = build(family)
    adapters = {
        "all": per_expert(model, ("gate_proj", "up_proj", "down_proj"), range(EXPERTS), (4,)),
        "some": per_expert(model, ("up_proj", "down_proj"), (0, 3), (1, 5, 8)),
        "gate": per_expert(model, ("gate_proj",), range(EXPERTS), (3,)),
        "up": per_expert(model, ("up_proj",), range(EXPERTS), (3,)),
    }
    for name, weights in adapters.items():
        write(tmp_path / name, weights)
    models = {name: with_deltas(model, weights) for name, weights in adapters.items()}
    base = copy.deepcopy(model)
    llm = LLM.over(assemble_tiny(model), {name: str(tmp_path / name) for name in adapters})
    outputs = ask(llm, [None, *adapters, None, *reversed(adapters)])
    check(outputs, {None: base, **models})
    answers = {output.adapter: output.completions[0].token_ids for output in outputs[:4]}
    assert len(set(answers.values())) == len(answers), "too weak to show"


@pytest.mark.parametrize(
    ("leaf", "old"), [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")]
)
def test_old_names_mean_the_same_projections(leaf: str, old: str, tmp_path: Path) -> None:
    model = build("MixtralConfig")
    weights = per_expert(model, (leaf,), range(EXPERTS), (4,))
    renamed = {
        name.replace(".mlp.", ".block_sparse_moe.").replace(leaf, old): pair
        for name, pair in weights.items()
    }
    write(tmp_path / "old", renamed)
    expected = with_deltas(model, weights)
    llm = LLM.over(assemble_tiny(model), {"old": str(tmp_path / "old")})
    check(ask(llm, ["old"] * 2), {"old": expected})


@pytest.mark.parametrize(
    "family", ["Qwen3MoeConfig", "MixtralConfig", "OlmoeConfig", "GptOssConfig"]
)
@pytest.mark.parametrize(
    "parameters",
    [
        ["experts.gate_up_proj", "experts.down_proj"],
        ["experts.down_proj"],
        ["experts.gate_up_proj", "gate.weight"],
    ],
    ids=["both", "down", "gate_up and router"],
)
def test_parameters_of_experts_answer_as_peft_does(
    family: str, parameters: list[str], tmp_path: Path
) -> None:
    model = build(family)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj"],
        target_parameters=[f"mlp.{p}".replace("gate.", f"{router_of(model)}.") for p in parameters],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    expected = trained_by_peft(model, config, tmp_path / "a")
    base = copy.deepcopy(model)
    llm = LLM.over(assemble_tiny(model), {"a": str(tmp_path / "a")})
    check(ask(llm, ["a", None, "a", None]), {"a": expected, None: base})


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("Qwen2MoeConfig", {"shared_expert.up_proj", "shared_expert.down_proj"}),
        ("Qwen2MoeConfig", {"shared_expert_gate"}),
        ("DeepseekV3Config", {"shared_experts.gate_proj", "shared_experts.down_proj"}),
    ],
    ids=["shared_expert", "shared_expert_gate", "shared_experts"],
)
def test_shared_experts_are_linears_beside_the_experts(
    family: str, modules: set[str], tmp_path: Path
) -> None:
    model = build(family)
    weights: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in model.named_modules():
        if name.partition(".mlp.")[2] in modules:
            shape = cast(torch.nn.Linear, module).weight.shape
            weights[name] = drawn((shape[1], shape[0]), 3, len(weights))
    assert weights
    write(tmp_path / "shared", weights)
    routed = per_expert(model, ("up_proj",), range(EXPERTS), (3,))
    write(tmp_path / "routed", routed)
    models = {"shared": with_deltas(model, weights), "routed": with_deltas(model, routed)}
    base = copy.deepcopy(model)
    llm = LLM.over(assemble_tiny(model), {name: str(tmp_path / name) for name in models})
    check(ask(llm, ["shared", None, "routed", "shared"]), {None: base, **models})


def test_dora_on_a_shared_expert_answers_as_peft_does(tmp_path: Path) -> None:
    model = build("Qwen2MoeConfig")
    targets = ["shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate"]
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, use_dora=True, task_type="CAUSAL_LM"
    )
    expected = trained_by_peft(model, config, tmp_path / "a")
    llm = LLM.over(assemble_tiny(model), {"a": str(tmp_path / "a")})
    check(ask(llm, ["a"] * 2), {"a": expected})


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "leaves"),
    [
        ("Qwen3MoeConfig", ["gate_proj", "up_proj", "down_proj"]),
        ("MixtralConfig", ["w1", "w2", "w3"]),
    ],
)
def test_projections_that_peft_turns_into_parameters_answer_as_peft_does(
    family: str, leaves: list[str], tmp_path: Path
) -> None:
    """It names the parameters without their module, and gives gate_up_proj twice the rank."""
    model = build(family)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=leaves, task_type="CAUSAL_LM")
    expected = trained_by_peft(model, config, tmp_path / "a")
    said = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert sorted(said["target_parameters"]) == ["down_proj", "gate_up_proj"]
    llm = LLM.over(assemble_tiny(model), {"a": str(tmp_path / "a")})
    check(ask(llm, ["a"] * 2), {"a": expected})


def test_a_magnitude_of_an_expert_counts(tmp_path: Path) -> None:
    """DoRA, which PEFT itself has only on linears: m (W + BA) / |W + BA| for each row."""
    model = build("Qwen3MoeConfig")
    weights = per_expert(model, ("gate_proj", "down_proj"), (1, 2), (4,))
    write(tmp_path / "dora", weights, use_dora=True)
    merged = with_deltas(model, weights)
    path = tmp_path / "dora" / "adapter_model.safetensors"
    tensors = load_file(path)
    for seed, module in enumerate(weights):
        weight = view(merged, module)
        torch.manual_seed(seed)
        magnitude = torch.rand(len(weight)) + 0.5
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = magnitude
        weight.mul_((magnitude / weight.norm(dim=1))[:, None])
    save_file(tensors, path)
    llm = LLM.over(assemble_tiny(model), {"dora": str(tmp_path / "dora")})
    check(ask(llm, ["dora"] * 4), {"dora": merged})


def router_of(model: PreTrainedModel) -> str:
    """What the router is called."""
    return "router" if model.config.model_type == "gpt_oss" else "gate"


def on_routers(model: PreTrainedModel) -> Weights:
    """Deltas on the router of every layer that has experts."""
    names = [name.replace("experts", router_of(model)) for name in experts_of(model)]
    return {name: drawn((HIDDEN, EXPERTS), 2, seed) for seed, name in enumerate(names)}


@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "DeepseekV3Config", "GptOssConfig"])
def test_a_router_may_send_tokens_elsewhere(family: str, tmp_path: Path) -> None:
    model = build(family)
    weights = {**on_routers(model), **per_expert(model, ("up_proj",), (0,), (2,))}
    write(tmp_path / "router", weights)
    expected, base = with_deltas(model, weights), copy.deepcopy(model)
    llm = LLM.over(assemble_tiny(model), {"router": str(tmp_path / "router")})
    check(ask(llm, ["router", None, "router", None]), {"router": expected, None: base})


def test_a_router_of_the_adapters_own_answers_as_peft_does(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    config = LoraConfig(
        r=3, target_modules=["q_proj"], modules_to_save=["gate"], task_type="CAUSAL_LM"
    )
    expected = trained_by_peft(model, config, tmp_path / "a")
    base = copy.deepcopy(model)
    llm = LLM.over(assemble_tiny(model), {"a": str(tmp_path / "a")})
    check(ask(llm, ["a", None, "a", None]), {"a": expected, None: base})


def test_base_rows_keep_every_bit_beside_experts(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    write(tmp_path / "a", per_expert(model, ("gate_proj", "down_proj"), range(EXPERTS), (4,)))
    llm = LLM.over(assemble_tiny(model, prefix_cache=False), {"a": str(tmp_path / "a")})
    alone, beside = ask(llm, [None] * 4), ask(llm, [None, "a", None, "a"])
    for row in (0, 2):
        assert _likelihoods(beside[row]) == _likelihoods(alone[row])


def _likelihoods(output: RequestOutput) -> list[float]:
    return [entry.logprob for entry in output.completions[0].logprobs]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_compute_something_else_are_found_at_start(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = AdaptedExperts.__call__

    def swapped(self: AdaptedExperts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return right(self, x, index.flip(-1), weights)

    monkeypatch.setattr(AdaptedExperts, "__call__", swapped)
    with pytest.raises(ModelNotServable, match="experts"):
        assemble_tiny(build(family))


# Refused ----------------------------------------------------------------------------------------


def refusal(tmp_path: Path, weights: Weights, **config: Any) -> str:
    model = build("Qwen3MoeConfig")
    write(tmp_path / "bad", weights, **config)
    with pytest.raises(AdapterRefused) as refused:
        LLM.over(assemble_tiny(model), {"bad": str(tmp_path / "bad")})
    return "\n".join(refused.value.reasons)


def stacked(rank: int, inside: int, out: int, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    return torch.ones(experts * rank, inside), torch.ones(out, experts * rank)


def test_an_expert_that_is_not_there_is_named(tmp_path: Path) -> None:
    name = f"model.layers.0.mlp.experts.{EXPERTS}.up_proj"
    reason = refusal(tmp_path, {name: drawn((HIDDEN, SIZE), 2, 0)})
    assert f"mlp.experts.{EXPERTS}.up_proj" in reason
    assert "no such expert can take LoRA" in reason


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (stacked(4, HIDDEN, 2 * SIZE, experts=3), "A has 12 rows"),
        (stacked(3, HIDDEN, 2 * SIZE), "4 experts of rank 4"),
        (stacked(4, HIDDEN, HIDDEN), "fit neither gate_up_proj [48, 32] nor down_proj [32, 24]"),
    ],
    ids=["experts", "rank", "shape"],
)
def test_a_parameter_of_other_sizes_is_refused(
    pair: tuple[Tensor, Tensor], words: str, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.experts"
    assert words in refusal(tmp_path, {name: pair}, rank_pattern={})


def test_experts_that_all_lack_a_or_b_would_change_nothing(tmp_path: Path) -> None:
    """Each of the two tensors is not zero, but no expert has anything in both."""
    a, b = stacked(4, SIZE, HIDDEN)
    a[4:], b[:, 0::EXPERTS] = 0, 0
    reason = refusal(tmp_path, {"model.layers.0.mlp.experts": (a, b)}, rank_pattern={})
    assert "change nothing" in reason


def test_a_parameter_that_is_not_finite_is_named_as_the_file_does(tmp_path: Path) -> None:
    a, b = stacked(4, SIZE, HIDDEN)
    b[3, 7] = torch.nan
    reason = refusal(tmp_path, {"model.layers.0.mlp.experts": (a, b)}, rank_pattern={})
    assert reason.count("mlp.experts.lora_B.weight") == 1
    assert "not finite" in reason


def test_an_expert_that_changes_twice_is_refused(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    weights = {
        experts: stacked(4, SIZE, HIDDEN),
        f"{experts}.2.down_proj": drawn((SIZE, HIDDEN), 4, 0),
    }
    assert "meant for the same place" in refusal(tmp_path, weights, rank_pattern={})


def test_parameters_without_tensors_are_named(tmp_path: Path) -> None:
    weights = {"model.layers.0.self_attn.q_proj": drawn((HIDDEN, HIDDEN), 2, 0)}
    reason = refusal(tmp_path, weights, target_parameters=["mlp.experts.down_proj"])
    assert "target_parameters: mlp.experts.down_proj have no tensors" in reason


def test_dora_on_a_router_is_refused(tmp_path: Path) -> None:
    router = "model.layers.0.mlp.gate"
    write(tmp_path / "dora", {router: drawn((HIDDEN, EXPERTS), 2, 0)}, use_dora=True)
    path = tmp_path / "dora" / "adapter_model.safetensors"
    magnitude = {f"base_model.model.{router}.lora_magnitude_vector": torch.ones(EXPERTS)}
    save_file(load_file(path) | magnitude, path)
    with pytest.raises(AdapterRefused, match="on a router"):
        LLM.over(assemble_tiny(build("Qwen3MoeConfig")), {"dora": str(tmp_path / "dora")})


# Beside the server --------------------------------------------------------------------------------


def loaded(folder: Path, model: PreTrainedModel) -> LoadedAdapter:
    layout = assemble_tiny(copy.deepcopy(model)).worker.layout
    return read_adapter("a", folder, layout, max_rank=64)


@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "MixtralConfig"])
def test_experts_and_routers_can_be_merged_into_a_checkpoint(family: str, tmp_path: Path) -> None:
    model = build(family)
    weights = per_expert(model, ("gate_proj", "down_proj"), (0, 2), (4,)) | {
        "model.layers.1.mlp.gate": drawn((HIDDEN, EXPERTS), 4, 9)
    }
    write(tmp_path / "a", weights)
    adapter = loaded(tmp_path / "a", model)
    merged = copy.deepcopy(model)
    fold(merged, adapter, "a")
    expected = with_deltas(model, weights).state_dict()
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name


def packed(rank: int, inside: int, out: int) -> int:
    """Bytes of one projection in float32."""
    return 4 * (rank * pad(inside) + out * pad(rank))


@pytest.mark.parametrize(
    ("experts", "leaves", "rank"),
    [
        (range(EXPERTS), ("gate_proj", "up_proj", "down_proj"), 8),
        ((2,), ("up_proj",), 8),
        ((0, 3), ("up_proj", "down_proj"), 3),
    ],
    ids=["all", "one", "some"],
)
def test_every_tier_and_inspect_count_what_an_adapter_has_and_no_more(
    experts: Sequence[int], leaves: Sequence[str], rank: int, tmp_path: Path
) -> None:
    model = build("Qwen3MoeConfig")
    num_layers = len(experts_of(model))
    write(tmp_path / "a", per_expert(model, leaves, experts, (rank,)))
    sizes = {
        "gate_proj": packed(rank, HIDDEN, SIZE),
        "up_proj": packed(rank, HIDDEN, SIZE),
        "down_proj": packed(rank, SIZE, HIDDEN),
    }
    expected = num_layers * len(experts) * sum(sizes[leaf] for leaf in leaves)
    parts = assemble_tiny(model, device_cache="1MiB")
    llm = LLM.over(parts, {"a": str(tmp_path / "a")})
    ask(llm, ["a"])
    [info] = llm.adapters()
    stats = parts.core.stats()
    assert (info.tier, info.num_bytes) == ("slot", expected)
    assert (stats.host_bytes, stats.host_adapters) == (expected, 1)
    for base in (None, ReferenceBase(parts.worker.layout, "float32", lambda _: None)):
        found = inspect_adapter(
            tmp_path / "a",
            base,
            max_rank=8,
            packed_bytes=lambda spec, layout, _: packed_bytes(spec, layout, torch.float32),
        )
        assert found.bytes.block == expected
        assert len(found.modules) == num_layers * len(experts) * len(leaves)


def test_a_base_without_weights_has_the_same_experts(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    model.save_pretrained(str(tmp_path / "base"))
    drawn_layout = draw(str(tmp_path / "base")).layout
    layout = assemble_tiny(model).worker.layout
    assert drawn_layout.experts == layout.experts
    assert drawn_layout.routers == layout.routers
    assert drawn_layout.modules.keys() == layout.modules.keys()
