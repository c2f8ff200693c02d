"""Verdicts on whole sets of configurations, each with weights that fit what it says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.meaning import BesideLora
from loramux.adapters.formats.peft_config import PeftConfig, parse_config
from loramux.adapters.formats.peft_spec import build_spec
from loramux.adapters.report import Report
from loramux.adapters.spec import BaseLayout, ModuleShape
from tests.adapter_files import (
    PREFIX,
    REPOSITORY,
    Shapes,
    entries,
    gpt2_layout,
    llama_layout,
    pair,
)

HERE = REPOSITORY / "tests" / "adapter_configs"
OUTSIDE = REPOSITORY.parent / "shared" / "adapter_configs"

SERVE = ""
"""Any other verdict is a word that the refusal must hold."""

VERDICTS = {
    "gen_all_linear_string.json": SERVE,
    "gen_alora.json": "aLoRA",
    "gen_bias_all.json": SERVE,
    "gen_bias_lora_only.json": SERVE,
    "gen_dora_rslora.json": SERVE,
    "gen_embed_lm_head_targets.json": SERVE,
    "gen_ensure_weight_tying.json": SERVE,
    "gen_exclude_modules.json": SERVE,
    "gen_init_corda.json": "init_lora_weights=corda",
    "gen_init_eva.json": SERVE,
    "gen_init_gaussian.json": SERVE,
    "gen_init_loftq.json": "init_lora_weights=loftq",
    "gen_init_olora.json": "init_lora_weights=olora",
    "gen_init_orthogonal.json": SERVE,
    "gen_init_pissa.json": "init_lora_weights=pissa",
    "gen_init_pissa_niter_4.json": "init_lora_weights=pissa_niter_4",
    "gen_layer_replication.json": "layer_replication",
    "gen_layers_to_transform.json": SERVE,
    "gen_layers_to_transform_int.json": SERVE,
    "gen_lora_bias.json": SERVE,
    "gen_megatron.json": SERVE,
    "gen_modules_to_save_empty_list.json": SERVE,
    "gen_modules_to_save_norms.json": SERVE,
    "gen_qalora.json": "QALoRA",
    "gen_r12_fractional_scale.json": SERVE,
    "gen_r1_alpha1.json": SERVE,
    "gen_r256_alpha512.json": SERVE,
    "gen_rank_alpha_pattern.json": SERVE,
    "gen_regex_target_layers.json": SERVE,
    "gen_revision_pinned.json": SERVE,
    "gen_rslora_with_rank_pattern.json": SERVE,
    "gen_target_parameters_moe.json": "target_parameters: ",
    "gen_task_seq_cls.json": "sequence classification",
    "gen_trainable_token_indices.json": SERVE,
    "mut_alpha_float.json": SERVE,
    "mut_alpha_missing.json": "lora_alpha is missing",
    "mut_alpha_negative.json": SERVE,
    "mut_base_path_traversal.json": SERVE,
    "mut_nan_dropout.json": SERVE,
    "mut_peft_type_lowercase.json": "peft_type is lora",
    "mut_r_bool.json": "r must be a positive integer",
    "mut_r_string.json": "r must be a positive integer",
    "mut_r_zero.json": "r must be a positive integer",
    "mut_regex_catastrophic.json": SERVE,
    "mut_truncated.json": "not JSON",
    "mut_unknown_future_keys.json": "use_superlora",
    "mut_unknown_future_keys_inert.json": SERVE,
    "mut_utf8_bom.json": SERVE,
}

BASE = llama_layout(layers=30, hidden=576, kv=192, mlp=1536, vocab=49152, bias=True)

KEY_PREFIXES = {
    "lora_peft_0.20_llamamodel_auto_mapping.json": "",
    "lora_whisper_seq2seq.json": "model.encoder.",
    "lora_unsloth_gemma4_auto_mapping_unsloth_fixed.json": "model.language_model.",
}
"""What stands before ``layers.N`` in weight files of these, where it is not ``model.``."""

OTHER_SIZES = {
    "lora_unsloth_gemma4_auto_mapping_unsloth_fixed.json": llama_layout(hidden=2560, mlp=10240),
}
"""Layouts of the models that these were trained on, where the difference is the point."""


def refusal(path: Path) -> str:
    """All reasons against the configuration with weights that go with it; empty: served."""
    report = Report()
    base = gpt2_layout() if "gpt2" in path.name else BASE
    try:
        config = parse_config(path.read_bytes(), report)
        if config is not None:
            weights = entries(weights_for(config, path.name, base))
            build_spec(config, weights, base, max_rank=512, report=report)
    except MalformedFile as problem:
        return str(problem)
    return "\n".join(report.reasons)


def weights_for(config: PeftConfig, name: str, base: BaseLayout) -> Shapes:
    """Weights such as training with this configuration would have saved."""
    shapes = weights_beside(config.beside, base)
    trained_on = OTHER_SIZES.get(name, base)
    for target in config.targets or ("q_proj", "v_proj"):
        modules = {
            m: s for m, s in trained_on.modules.items() if m == target or m.endswith("." + target)
        }
        for module, shape in (modules or unknown(target)).items():
            path = module.replace("model.", KEY_PREFIXES.get(name, "model."), 1)
            rank, _ = config.rank_and_scale(path)
            found = pair(path, shape, rank)
            if module == base.embedding:
                found = {k.replace("lora_", "lora_embedding_")[:-7]: v for k, v in found.items()}
            shapes |= found
            if config.beside.lora_bias:
                shapes[f"{PREFIX}{path}.lora_B.bias"] = (shape.out_features,)
            if config.use_dora:
                shapes[f"{PREFIX}{path}.lora_magnitude_vector"] = (shape.out_features,)
    return shapes


def weights_beside(beside: BesideLora, base: BaseLayout) -> dict[str, tuple[int, ...]]:
    """Values of its own that such an adapter has for parameters of the base."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, parameters in base.replaceable.items():
        for leaf, shape in parameters.items():
            saved = bool(beside.modules_to_save) and module.endswith(beside.modules_to_save)
            if saved or (leaf == "bias" and beside.bias != "none"):
                shapes[f"{PREFIX}{module}.{leaf}"] = shape
    for name, rows in beside.token_rows.items():
        module = name or base.embedding
        key = f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"
        shapes[key] = (len(rows), base.replaceable[base.embedding or ""]["weight"][1])
    return shapes


def unknown(target: str) -> dict[str, ModuleShape]:
    return {f"model.layers.0.{target}": ModuleShape(576, 576)}


def index(folder: Path) -> list[dict[str, str]]:
    text = (folder / "index.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


def test_every_configuration_has_a_verdict():
    files = {path.name for path in HERE.glob("*.json")}
    assert files == set(VERDICTS) == {row["file"] for row in index(HERE)}


@pytest.mark.parametrize("name", VERDICTS)
def test_configuration_gets_its_verdict(name: str):
    reasons = refusal(HERE / name)
    if VERDICTS[name] == SERVE:
        assert reasons == ""
    else:
        assert VERDICTS[name] in reasons


SERVED_ALL_THE_SAME = {"gen_modules_to_save_norms.json"}
"""The collection asks for a refusal; the norms are replaced for the adapter's own rows."""


def expected(text: str) -> tuple[bool, ...]:
    """Which verdicts (True: served) the words of ``server_should`` allow."""
    served = text.startswith("serve")
    if text.startswith("as ") or (served and "refuse on Llama" in text):
        return (served,)
    if served:
        return (True, False) if "refuse" in text else (True,)
    assert text.startswith("refuse"), text
    return (True, False) if "serve" in text or "unless" in text else (False,)


def outside_rows() -> list[dict[str, str]]:
    return index(OUTSIDE) if (OUTSIDE / "index.tsv").exists() else []


@pytest.mark.skipif(not outside_rows(), reason="the collection is not beside this checkout")
@pytest.mark.parametrize("row", outside_rows(), ids=lambda row: row["file"])
def test_configuration_of_the_collection_gets_its_verdict(row: dict[str, str]):
    reasons = refusal(OUTSIDE / row["file"])
    if row["file"] in SERVED_ALL_THE_SAME:
        assert reasons == ""
        return
    assert (reasons == "") in expected(row["server_should"]), reasons


def test_rank_and_alpha_patterns_of_peft_give_their_values():
    raw = json.loads((HERE / "gen_rank_alpha_pattern.json").read_text())
    config = parse_config(json.dumps(raw).encode(), Report())
    assert config is not None
    for key, rank in raw["rank_pattern"].items():
        if key.isidentifier():
            assert config.rank_and_scale(f"model.layers.29.self_attn.{key}")[0] == rank
