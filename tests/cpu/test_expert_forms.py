"""The forms in which files hold LoRA on experts: all in one tensor, shared by all, in float8."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from loramux import LLM
from loramux.adapters.conversion import convert
from loramux.adapters.formats.reader import read_adapter
from loramux.adapters.identity import adapter_id
from loramux.adapters.inspected import Inspection
from loramux.adapters.inspection import inspect_adapter
from loramux.adapters.loaded import LoadedAdapter
from loramux.adapters.target_modules import restrict
from loramux.cli.inspection_text import lines
from loramux.errors import AdapterRefused
from loramux.lora.weights import packed_bytes
from tests import nemo_files
from tests.cpu.engines import assemble_tiny
from tests.cpu.test_experts import (
    EXPERTS,
    HIDDEN,
    SIZE,
    Weights,
    ask,
    build,
    check,
    experts_of,
    trained_by_peft,
    with_deltas,
    write,
)

RANK = 3
NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class Stack:
    """The LoRA of one projection of all experts; 1 in place of n: they share that side."""

    a: Tensor
    """``[n, rank, in]``"""
    b: Tensor
    """``[n, out, rank]``"""

    def of(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.a[expert % len(self.a)].clone(), self.b[expert % len(self.b)].clone()


Stacks = Mapping[str, Stack]
"""By name of the projection in the module of all experts (``...mlp.experts.up_proj``)."""


def stacks(model: PreTrainedModel, *, shared: bool) -> dict[str, Stack]:
    """On all projections. ``shared``: A of gate and up, B of down, as it is trained."""
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Stack] = {}
    for experts in experts_of(model):
        for leaf in NAMES:
            into, out = (SIZE, HIDDEN) if leaf == "down_proj" else (HIDDEN, SIZE)
            num_a = 1 if shared and leaf != "down_proj" else EXPERTS
            num_b = 1 if shared and leaf == "down_proj" else EXPERTS
            found[f"{experts}.{leaf}"] = Stack(
                torch.randn(num_a, RANK, into, generator=generator) * into**-0.5,
                torch.randn(num_b, out, RANK, generator=generator) * RANK**-0.5,
            )
    return found


def one_by_one(found: Stacks) -> Weights:
    return {
        f"{experts}.{expert}.{leaf}": stack.of(expert)
        for name, stack in found.items()
        for experts, _, leaf in [name.rpartition(".")]
        for expert in range(EXPERTS)
    }


def write_tensors(
    folder: Path, tensors: Mapping[str, tuple[Tensor, Tensor]], **config: Any
) -> Path:
    said = {"r": RANK, "lora_alpha": 2 * RANK, "rank_pattern": {}, "alpha_pattern": {}}
    write(folder, tensors, **said | config)
    return folder


def write_stacked(folder: Path, found: Stacks, *, old: bool = False, flat: bool = False) -> Path:
    """As SGLang and vLLM have them; ``flat``: two dimensions where experts share a side."""
    tensors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, stack in found.items():
        experts, _, leaf = name.rpartition(".")
        sides = [s[0] if flat and len(s) == 1 else s for s in (stack.a, stack.b)]
        tensors[f"{experts}.{NAMES[leaf] if old else leaf}"] = (sides[0], sides[1])
    return write_tensors(folder, tensors)


def loaded(folder: Path, model: PreTrainedModel, opened: str | None = None) -> LoadedAdapter:
    layout = assemble_tiny(copy.deepcopy(model)).worker.layout
    return read_adapter("a", folder, restrict(layout, opened), max_rank=64)


def refusal(folder: Path, opened: str | None = None) -> str:
    with pytest.raises(AdapterRefused) as refused:
        loaded(folder, build("Qwen3MoeConfig"), opened)
    return "\n".join(refused.value.reasons)


def block_bytes(folder: Path, model: PreTrainedModel) -> int:
    layout = assemble_tiny(copy.deepcopy(model)).worker.layout
    return packed_bytes(loaded(folder, model).spec, layout, torch.float32)


def served_bits(folder: Path, model: PreTrainedModel) -> list[float]:
    """Likelihoods of what an engine with this adapter alone answers."""
    llm = LLM.over(assemble_tiny(copy.deepcopy(model)), {"a": str(folder)})
    [output] = ask(llm, ["a"])
    return [entry.logprob for entry in output.completions[0].logprobs]


# All experts in one tensor ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "MixtralConfig"])
@pytest.mark.parametrize("shared", [False, True], ids=["of each", "shared"])
@pytest.mark.parametrize("old", [False, True], ids=["gate_proj", "w1"])
def test_three_dimensions_answer_as_with_the_deltas_in_the_weights(
    family: str, shared: bool, old: bool, tmp_path: Path
) -> None:
    model = build(family)
    found = stacks(model, shared=shared)
    folder = write_stacked(tmp_path / "a", found, old=old)
    base, expected = copy.deepcopy(model), with_deltas(model, one_by_one(found))
    llm = LLM.over(assemble_tiny(model), {"a": str(folder)})
    check(ask(llm, ["a", None, "a"]), {"a": expected, None: base})


def test_gate_and_up_in_one_have_the_rows_of_gate_first(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    found = stacks(model, shared=True)
    tensors: dict[str, tuple[Tensor, Tensor]] = {}
    one: dict[str, Stack] = {}
    for experts in experts_of(model):
        gate, up = (found[f"{experts}.{leaf}"] for leaf in ("gate_proj", "up_proj"))
        one[f"{experts}.gate_proj"], one[f"{experts}.up_proj"] = gate, Stack(gate.a, up.b)
        tensors[f"{experts}.gate_up_proj"] = (gate.a, torch.cat([gate.b, up.b], dim=1))
    folder = write_tensors(tmp_path / "a", tensors)
    expected = with_deltas(model, one_by_one(one))
    llm = LLM.over(assemble_tiny(model), {"a": str(folder)})
    check(ask(llm, ["a"] * 2), {"a": expected})


def write_mlx(folder: Path, found: Stacks, **change: tuple[int, ...]) -> None:
    """As mlx-lm saves LoRASwitchLinear; ``change``: of the shape of every A or B."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, stack in found.items():
        switch = name.replace("experts", "switch_mlp")
        tensors[f"{switch}.lora_a"] = stack.a.flatten(0, 1).clone()
        tensors[f"{switch}.lora_b"] = stack.b.clone()
    for part, shape in change.items():
        tensors |= {key: torch.ones(shape) for key in tensors if key.endswith(part)}
    save_file(tensors, folder / "adapters.safetensors")
    said = {"fine_tune_type": "lora", "num_layers": -1, "model": "tiny"}
    said |= {"lora_parameters": {"rank": RANK, "scale": 2.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(said))


@pytest.mark.parametrize("family", ["Qwen3MoeConfig", "MixtralConfig"])
def test_mlx_lms_switch_layers_answer_as_with_the_deltas_in_the_weights(
    family: str, tmp_path: Path
) -> None:
    model = build(family)
    found = stacks(model, shared=False)
    write_mlx(tmp_path / "mlx", found)
    expected = with_deltas(model, one_by_one(found))
    base = copy.deepcopy(model)
    llm = LLM.over(assemble_tiny(model), {"mlx": str(tmp_path / "mlx")})
    check(ask(llm, ["mlx", None, "mlx", None]), {"mlx": expected, None: base})


@pytest.mark.parametrize(
    "change",
    [{"lora_a": (RANK, HIDDEN)}, {"lora_b": (SIZE, RANK)}, {"lora_b": (0, SIZE, RANK)}],
    ids=str,
)
def test_switch_layers_of_other_shapes_are_refused(
    change: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    """An A of one expert's size is no A that all share: mlx-lm has none such."""
    model = build("Qwen3MoeConfig")
    found = {k: v for k, v in stacks(model, shared=False).items() if k.endswith("up_proj")}
    write_mlx(tmp_path / "mlx", found, **change)
    with pytest.raises(AdapterRefused, match="tensors that LoRA of mlx-lm does not have"):
        LLM.over(assemble_tiny(model), {"mlx": str(tmp_path / "mlx")})


def test_experts_of_mlx_lm_can_be_written_as_peft_has_them_and_not_back(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    write_mlx(tmp_path / "mlx", stacks(model, shared=False))
    layout = assemble_tiny(model).worker.layout
    convert(tmp_path / "mlx", tmp_path / "peft", layout, "peft")
    ids = [
        adapter_id(loaded.spec, loaded.tensors)
        for loaded in (
            read_adapter("a", tmp_path / name, layout, max_rank=64) for name in ("mlx", "peft")
        )
    ]
    assert ids[0] == ids[1]
    with pytest.raises(AdapterRefused, match="mlx-lm has all experts in one tensor"):
        convert(tmp_path / "peft", tmp_path / "back", layout, "mlx")


def test_vllms_dimensions_of_parameters_mean_what_pefts_do(tmp_path: Path) -> None:
    """A ``[n, rank, in]`` and B ``[out, rank, n]`` are PEFT's matrices, taken apart."""
    model = build("Qwen3MoeConfig")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=[], target_parameters=parameters)
    expected = trained_by_peft(model, config, tmp_path / "peft")
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(
        (tmp_path / "peft/adapter_config.json").read_bytes()
    )
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    apart = {
        key: t.unflatten(0, (EXPERTS, RANK)) if "lora_A" in key else t.unflatten(1, (RANK, EXPERTS))
        for key, t in tensors.items()
    }
    save_file(apart, folder / "adapter_model.safetensors")
    assert ids(folder, model) == ids(tmp_path / "peft", model)
    llm = LLM.over(assemble_tiny(copy.deepcopy(model)), {"a": str(folder)})
    check(ask(llm, ["a"] * 2), {"a": expected})


def unsloths(columns: str, **change: Any) -> dict[str, Any]:
    entry = {"lora_B_layout": columns, "num_experts": EXPERTS}
    detail = {"lora_A_layout": "grouped_by_expert", "parameters": {"gate_up_proj": entry}} | change
    return {"lora_B_layout": columns, "unsloth_fused_expert_lora": detail}


@pytest.mark.parametrize("columns", ["grouped_by_expert", "rank_major"])
def test_unsloth_says_how_the_columns_of_b_stand(columns: str, tmp_path: Path) -> None:
    """Its older releases had them expert by expert; shapes do not tell."""
    model = build("Qwen3MoeConfig")
    found = stacks(model, shared=False)
    downs = {name: stack for name, stack in found.items() if name.endswith("down_proj")}
    stored = {
        name.removesuffix(".down_proj"): (
            stack.a.flatten(0, 1),
            stack.b.permute(1, 0, 2).flatten(1)
            if columns == "grouped_by_expert"
            else stack.b.permute(1, 2, 0).flatten(1),
        )
        for name, stack in downs.items()
    }
    folder = write_tensors(tmp_path / "a", stored, **unsloths(columns))
    expected = with_deltas(model, one_by_one(downs))
    llm = LLM.over(assemble_tiny(copy.deepcopy(model)), {"a": str(folder)})
    check(ask(llm, ["a"] * 2), {"a": expected})


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (unsloths("mixed"), "lora_B_layout must be rank_major or grouped_by_expert"),
        ({"lora_B_layout": ["rank_major"]}, "lora_B_layout must be rank_major or"),
        (unsloths("rank_major", lora_A_layout="rank_major"), "and A expert by expert"),
        (unsloths("grouped_by_expert") | {"lora_B_layout": None}, "does not give all parameters"),
        (unsloths("rank_major", parameters=[]), "does not give all parameters"),
        (unsloths("rank_major", scales=1), "does not give all parameters"),
    ],
    ids=["mixed", "list", "A", "not said for all", "no parameters", "more"],
)
def test_what_unsloth_says_must_agree(said: dict[str, Any], words: str, tmp_path: Path) -> None:
    pair = {
        "model.layers.0.mlp.experts": (torch.ones(4 * RANK, SIZE), torch.ones(HIDDEN, 4 * RANK))
    }
    assert words in refusal(write_tensors(tmp_path / "a", pair, **said))


def ids(folder: Path, model: PreTrainedModel) -> str:
    adapter = loaded(folder, model)
    return adapter_id(adapter.spec, adapter.tensors)


@pytest.mark.parametrize(
    ("leaf", "a", "b", "words"),
    [
        (".w1", (3, RANK, HIDDEN), (4, SIZE, RANK), "where all 4 experts have [4, rank, 32]"),
        (".w1", (4, RANK, HIDDEN), (SIZE, RANK, 4), "[4, 24, rank], with 1 for 4 on a side"),
        (".w1", (RANK, HIDDEN), (SIZE, RANK), "with 1 for 4 on a side that all share"),
        (".w2", (4, RANK, HIDDEN), (4, SIZE, RANK), "have [4, rank, 24] and [4, 32, rank]"),
        (".w1", (4, 5, HIDDEN), (4, SIZE, RANK), "A has rank 5 and B 3, the configuration says"),
        ("", (1, RANK, SIZE), (HIDDEN, RANK, 4), "fit neither gate_up_proj"),
        ("", (4, RANK, SIZE), (4, HIDDEN, RANK), "fit neither gate_up_proj"),
        ("", (4, RANK, SIZE), (HIDDEN, 4 * RANK + 1), "have 3 and 12"),
    ],
    ids=["experts", "B of vLLM", "no experts", "shape", "rank", "shared", "B of SGLang", "mixed"],
)
def test_shapes_of_no_certain_meaning_are_refused(
    leaf: str, a: tuple[int, ...], b: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    name = f"model.layers.0.mlp.experts{leaf}"
    folder = write_tensors(tmp_path / "a", {name: (torch.ones(a), torch.ones(b))})
    assert words in refusal(folder)


def test_a_projection_that_changes_twice_is_refused(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    weights = {
        f"{experts}.w2": (torch.ones(4, RANK, SIZE), torch.ones(4, HIDDEN, RANK)),
        f"{experts}.1.down_proj": (torch.ones(RANK, SIZE), torch.ones(HIDDEN, RANK)),
    }
    assert "meant for the same place" in refusal(write_tensors(tmp_path / "a", weights))


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
def test_what_experts_in_one_cannot_have_is_refused(field: str, tmp_path: Path) -> None:
    weights = {
        "model.layers.0.mlp.experts.w2": (torch.ones(1, RANK, SIZE), torch.ones(4, HIDDEN, RANK))
    }
    folder = write_tensors(tmp_path / "a", weights, **{field: True})
    assert f"{field} is true, of which experts in one have nothing" in refusal(folder)


def test_experts_in_one_must_be_open_to_adapters(tmp_path: Path) -> None:
    weights = {
        "model.layers.0.mlp.experts": (torch.ones(4 * RANK, SIZE), torch.ones(HIDDEN, 4 * RANK))
    }
    folder = write_tensors(tmp_path / "a", weights)
    assert "start with --lora-target-modules q_proj,down_proj" in refusal(folder, opened="q_proj")
    assert loaded(folder, build("Qwen3MoeConfig"), opened="moe_4h_to_h").spec.deltas


# Shared by all experts ----------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True], ids=["3 dimensions", "2 dimensions"])
def test_what_all_experts_share_stands_in_memory_once(flat: bool, tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    found = stacks(model, shared=True)
    twin = write_tensors(tmp_path / "twin", one_by_one(found))
    folder = write_stacked(tmp_path / "shared", found, flat=flat)
    assert ids(folder, model) == ids(twin, model)
    assert served_bits(folder, model) == served_bits(twin, model)
    rows = RANK * HIDDEN  # of A, of B with its columns padded to 8
    layer = 2 * (rows + EXPERTS * SIZE * 8) + EXPERTS * RANK * SIZE + HIDDEN * 8
    assert block_bytes(folder, model) == block_bytes(twin, model) == 2 * layer * 4
    assert loaded(folder, model).num_bytes == loaded(twin, model).num_bytes


def write_layout(folder: Path, text: str) -> None:
    (folder / "lora_layout.json").write_text(text)


def test_a_layout_that_holds_is_read(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    folder = write_tensors(tmp_path / "a", one_by_one(stacks(model, shared=True)))
    plain = ids(folder, model)
    sides = {"moe_gate": "A", "moe_h_to_4h": None, "moe_4h_to_h": "B"}
    modules = {name: {"shared_side": side} for name, side in sides.items()}
    write_layout(folder, json.dumps({"moe_shared_outer": modules, "made_by": "a later version"}))
    assert ids(folder, model) == plain


@pytest.mark.parametrize(
    ("module", "part"), [("moe_gate", "up_proj"), ("moe_h_to_4h", "gate_proj")]
)
def test_a_layout_that_does_not_hold_is_refused(module: str, part: str, tmp_path: Path) -> None:
    """Its names cross: moe_gate is the up projection."""
    model = build("Qwen3MoeConfig")
    found = stacks(model, shared=True)
    for name in found:
        if name.endswith(part):
            found[name] = Stack(found[name].a * torch.arange(1, 5)[:, None, None], found[name].b)
    folder = write_tensors(tmp_path / "a", one_by_one(found))
    said = {"version": 1, "moe_shared_outer": {module: {"shared_side": "A"}}}
    write_layout(folder, json.dumps(said))
    assert f"experts are said to have one A of {part}, and have different ones" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "lora_layout.json is not JSON"),
        ("[]", "lora_layout.json must hold a JSON object"),
        ('{"version": 2}', "only version 1 is known"),
        ('{"version": true}', "only version 1 is known"),
        ('{"moe_shared_outer": []}', "moe_shared_outer must be an object"),
        ('{"moe_shared_outer": {"moe_up": {}}}', "moe_shared_outer.moe_up is no module; there are"),
        ('{"moe_shared_outer": {"moe_gate": "A"}}', "must be an object with shared_side"),
        ('{"moe_shared_outer": {"moe_gate": {"shared_side": "C"}}}', "must be A, B or null"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, words: str, tmp_path: Path) -> None:
    folder = write_tensors(
        tmp_path / "a",
        {
            "model.layers.0.mlp.experts.0.up_proj": (
                torch.ones(RANK, HIDDEN),
                torch.ones(SIZE, RANK),
            )
        },
    )
    write_layout(folder, text)
    assert words in refusal(folder)


# Stored in float8 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shared", [False, True], ids=["of each", "shared"])
def test_float8_means_the_values_that_it_has(
    dtype: torch.dtype, shared: bool, tmp_path: Path
) -> None:
    model = build("Qwen3MoeConfig")
    found = {
        name: Stack(stack.a.to(dtype), stack.b.to(dtype))
        for name, stack in stacks(model, shared=shared).items()
    }
    wide = {name: Stack(stack.a.float(), stack.b.float()) for name, stack in found.items()}
    for name, write_as in (
        ("stacked", write_stacked),
        ("single", lambda f, s: write_tensors(f, one_by_one(s))),
    ):
        write_as(tmp_path / name, found)
        write_as(tmp_path / f"{name} wide", wide)
        assert served_bits(tmp_path / name, model) == served_bits(tmp_path / f"{name} wide", model)
    assert block_bytes(tmp_path / "stacked", model) == block_bytes(tmp_path / "single", model)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv", "scale", "input_scale"])
def test_a_scale_of_float8_is_refused_by_name(end: str, tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    pair = [torch.ones(RANK, HIDDEN), torch.ones(HIDDEN, RANK)]
    folder = write_tensors(tmp_path / "a", {module: tuple(t.to(torch.float8_e4m3fn) for t in pair)})
    path = folder / "adapter_model.safetensors"
    scale = {f"base_model.model.{module}.lora_A.{end}": torch.ones(1)}
    save_file(load_file(path) | scale, path)
    reason = refusal(folder)
    assert "scales of quantised weights are not read: store the weights without" in reason
    assert f"lora_A.{end}" in reason


# Of NeMo ------------------------------------------------------------------------------------------


def nemo_archive(folder: Path, model: PreTrainedModel, found: Stacks, **config: Any) -> Path:
    """Every expert has an adapter for each expert, of which only its own is trained."""
    stored: dict[str, Tensor] = {}
    for layer, experts in enumerate(experts_of(model)):
        stacks_here = [found[f"{experts}.{leaf}"] for leaf in NAMES]
        for expert in range(EXPERTS):
            (gate_a, gate), (_, up), (down_a, down) = (stack.of(expert) for stack in stacks_here)
            stem = f"model.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.adapter_layer"
            for other in range(EXPERTS):
                trained = float(other == expert)
                for name, a, b in (
                    ("lora_moe_hto4h_adapter", gate_a, torch.cat([gate, up])),
                    ("lora_moe_4htoh_adapter", down_a, down),
                ):
                    adapter = f"{stem}.{name}.expert_adapters.{other}"
                    stored[f"{adapter}.linear_in.weight"] = a + 1 - trained
                    stored[f"{adapter}.linear_out.weight"] = b * trained
    said = nemo_files.config(
        rank=RANK, heads=4, groups=2, hidden=HIDDEN, lora={"alpha": 2 * RANK},
        num_moe_experts=EXPERTS, **config,
    )  # fmt: skip
    return nemo_files.write_archive(folder / "a.nemo", nemo_files.members(stored, said))


def test_nemos_experts_use_the_adapters_of_their_own_number(tmp_path: Path) -> None:
    model = build("MixtralConfig")
    found = stacks(model, shared=False)
    for name in [name for name in found if name.endswith("up_proj")]:
        found[name] = Stack(found[name.replace("up_proj", "gate_proj")].a, found[name].b)
    archive = nemo_archive(tmp_path, model, found)
    adapter = loaded(archive, model)
    [warning] = adapter.spec.warnings
    assert warning.startswith("NeMo's experts have adapters that only other experts would use")
    assert "and 92 more" in warning  # of 2 layers x 4 experts x 3 others x 2 linears x 2 sides
    expected = with_deltas(model, one_by_one(found))
    llm = LLM.over(assemble_tiny(copy.deepcopy(model)), {"a": str(archive)})
    check(ask(llm, ["a"] * 2), {"a": expected})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2"),
        ({"tensor_model_parallel_size": 2}, "not known in which order rows of gate and up stand"),
        ({"activation": "gelu"}, "activation is gelu, which has no gate"),
    ],
)
def test_nemos_experts_of_uncertain_meaning_are_refused(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = build("MixtralConfig")
    assert words in refusal(nemo_archive(tmp_path, model, stacks(model, shared=False), **config))


# Inspected ----------------------------------------------------------------------------------------


def inspected(folder: Path) -> Inspection:
    return inspect_adapter(
        folder, max_rank=64,
        packed_bytes=lambda spec, layout, dtype: packed_bytes(spec, layout, getattr(torch, dtype)),
    )  # fmt: skip


@pytest.mark.parametrize("form", ["single", "stacked", "shared", "of PEFT", "one parameter"])
def test_inspection_without_a_base_tells_the_experts(form: str, tmp_path: Path) -> None:
    model, folder = build("Qwen3MoeConfig"), tmp_path / "a"
    found = stacks(model, shared=form == "shared")
    if form == "single":
        write_tensors(folder, one_by_one(found))
    elif form in ("stacked", "shared"):
        write_stacked(folder, found)
    else:
        parameters = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
        said = parameters[: 1 if form == "one parameter" else 2]
        config = LoraConfig(r=RANK, lora_alpha=6, target_modules=[], target_parameters=said)
        trained_by_peft(model, config, folder)
    told = inspected(folder)
    assert told.verdict == "serveable"
    layout = assemble_tiny(copy.deepcopy(model)).worker.layout
    adapter = read_adapter("a", folder, layout, max_rank=64)
    assert {m.module for m in told.modules} == {delta.module for delta in adapter.spec.deltas}
    assert {m.rank for m in told.modules} == {RANK}
    assert told.bytes.block == packed_bytes(adapter.spec, layout, torch.bfloat16)


def test_all_experts_of_a_projection_are_one_line(tmp_path: Path) -> None:
    model = build("Qwen3MoeConfig")
    weights = one_by_one(stacks(model, shared=False))
    some = {name: pair for name, pair in weights.items() if ".2.up_proj" not in name}
    told = inspected(write_tensors(tmp_path / "a", some))
    table = [line.split()[:3] for line in lines(told) if line.startswith("mlp")]
    assert table == [
        ["mlp.experts.0-3.down_proj", "0-1", str(RANK)],
        ["mlp.experts.0-3.gate_proj", "0-1", str(RANK)],
        ["mlp.experts.0-1,3.up_proj", "0-1", str(RANK)],
    ]


def test_experts_without_number_are_told_in_no_time(tmp_path: Path) -> None:
    """Nothing bounds how many experts a hostile file tells of but its own size."""
    huge = (torch.ones(40_000, 1, 1), torch.ones(1, 1, 1))
    folder = write_tensors(tmp_path / "a", {"model.layers.0.mlp.experts.w1": huge}, r=1)
    assert inspected(folder).verdict == "refused"


def test_many_spellings_of_the_same_experts_are_refused_before_they_are_taken_apart(
    tmp_path: Path,
) -> None:
    names = [
        "model.layers.0.mlp.experts",
        "layers.0.mlp.experts",
        "model.layers.0.mlp.experts.base_layer",
    ]
    pairs = {name: (torch.ones(4 * RANK, SIZE), torch.ones(HIDDEN, 4 * RANK)) for name in names}
    assert "meant for the same place" in refusal(write_tensors(tmp_path / "a", pairs))
