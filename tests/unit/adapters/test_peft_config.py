from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from loramux.adapters.formats import peft_fields as fields
from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.formats.meaning import BesideLora
from loramux.adapters.formats.peft_config import PeftConfig, parse_config, read_config
from loramux.adapters.formats.peft_fields import HONOURED, REFUSED_WHEN_LIVE
from loramux.adapters.report import Report
from tests.adapter_files import REPOSITORY, lora_config

Q = "model.layers.0.self_attn.q_proj"


def parse(**change: Any) -> tuple[PeftConfig | None, Report]:
    report = Report()
    return parse_config(json.dumps(lora_config(**change)).encode(), report), report


def accepted(**change: Any) -> PeftConfig:
    config, report = parse(**change)
    assert report.reasons == ()
    assert config is not None
    return config


def refusal(**change: Any) -> str:
    _, report = parse(**change)
    assert report.refused
    return "\n".join(report.reasons)


# Scale -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rank", "scale"),
    [
        ({"r": 8, "lora_alpha": 16}, 8, 2.0),
        ({"r": 12, "lora_alpha": 5}, 12, 5 / 12),
        ({"r": 8, "lora_alpha": 12.5}, 8, 12.5 / 8),
        ({"r": 8, "lora_alpha": -16}, 8, -2.0),
        ({"r": 16, "lora_alpha": 16, "use_rslora": True}, 16, 4.0),
        ({"rank_pattern": {"q_proj": 2}}, 2, 4.0),
        ({"alpha_pattern": {"q_proj": 64}}, 4, 16.0),
        (
            {"use_rslora": True, "rank_pattern": {"q_proj": 25}, "alpha_pattern": {Q: 5}},
            25,
            5 / math.sqrt(25),
        ),
        ({"rank_pattern": None, "alpha_pattern": None}, 4, 2.0),
        ({"rank_pattern": {"other": 99}}, 4, 2.0),
    ],
)
def test_rank_and_scale_of_a_module(change: dict[str, Any], rank: int, scale: float):
    assert accepted(**change).rank_and_scale(Q) == (rank, scale)


@pytest.mark.parametrize("value", [0, -1, "8", True, 8.0, None, [8], 2**31])
def test_r_must_be_a_positive_integer(value: object):
    assert "r must be a positive integer" in refusal(r=value)


@pytest.mark.parametrize("value", ["16", True, None, [16], math.nan, math.inf, 10**400])
def test_alpha_must_be_a_finite_number(value: object):
    assert "lora_alpha must be a finite number" in refusal(lora_alpha=value)


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
def test_no_default_stands_in_for_a_missing_number(name: str):
    assert f"{name} is missing" in refusal(**{name: ...})


@pytest.mark.parametrize(
    "table", [[], "q_proj", {"q_proj": 0}, {"q_proj": "8"}, {"q_proj": True}, {"q_proj": 1.5}]
)
def test_rank_pattern_must_map_to_positive_integers(table: object):
    assert "rank_pattern must be an object" in refusal(rank_pattern=table)


@pytest.mark.parametrize("table", [3, {"q_proj": None}, {"q_proj": math.nan}])
def test_alpha_pattern_must_map_to_numbers(table: object):
    assert "alpha_pattern must be an object" in refusal(alpha_pattern=table)


def test_invalid_expression_in_a_pattern_is_refused_by_field():
    assert "rank_pattern has a key that is no valid" in refusal(rank_pattern={"(": 3})


@pytest.mark.parametrize("name", ["use_rslora", "use_dora"])
@pytest.mark.parametrize("value", ["true", 1, []])
def test_flags_must_be_booleans(name: str, value: object):
    assert f"{name} must be true or false" in refusal(**{name: value})


# Kind of adapter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["IA3", "VERA", "ADALORA", "PROMPT_TUNING", "lora"])
def test_other_methods_are_refused_by_name_alone(kind: str):
    _, report = parse(peft_type=kind, r=...)
    assert len(report.reasons) == 1
    assert kind in report.reasons[0]


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ({}, "peft_type is missing"),
        ({"model_type": "llama"}, "configuration of a model"),
        ({"fine_tune_type": "lora"}, "mlx-lm"),
        ({"lora_tuning": {}}, "NeMo"),
        ({"format": "other-lora"}, "other-lora"),
        ({"peft_type": 3}, "peft_type must be"),
    ],
)
def test_other_formats_are_named(raw: dict[str, Any], word: str):
    report = Report()
    assert parse_config(json.dumps(raw).encode(), report) is None
    assert word in report.reasons[0]


@pytest.mark.parametrize("task", [None, "CAUSAL_LM", ...])
def test_text_generation_is_served(task: object):
    accepted(task_type=task)


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"])
def test_tasks_without_text_are_refused(task: str):
    assert f"task_type {task}" in refusal(task_type=task)


def test_encoder_decoder_task_is_only_a_warning():
    _, report = parse(task_type="SEQ_2_SEQ_LM")
    assert not report.refused
    assert "SEQ_2_SEQ_LM" in report.warnings[0]


# Fields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_parameters", "mlp.experts.down_proj"),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"num_samples": 8}),
        ("velora_config", {"num_groups": 8}),
        ("arrow_config", {"top_k": 2}),
        ("enable_lora", [True, False, True]),
        ("bias", "some"),
        ("bias", []),
        ("lora_bias", "yes"),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", ["lm_head", 3]),
        ("modules_to_save", [""]),
        ("trainable_token_indices", 3),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", [True]),
        ("trainable_token_indices", {"embed_tokens": 3}),
    ],
)
def test_field_that_changes_the_arithmetic_is_refused_by_name(name: str, value: object):
    assert name in refusal(**{name: value})


@pytest.mark.parametrize("name", ["modules_to_save", "lora_bias", "kasa_config", "enable_lora"])
@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_same_field_unset_is_served(name: str, value: object):
    accepted(**{name: value})


def test_what_was_trained_beside_lora_is_read():
    beside = accepted(
        bias="lora_only",
        lora_bias=True,
        modules_to_save=["lm_head", "norm"],
        trainable_token_indices={"embed_tokens": [7, 3]},
        ensure_weight_tying=True,
    ).beside
    assert beside == BesideLora(
        "lora_only", True, ("lm_head", "norm"), {"embed_tokens": (7, 3)}, ties=True
    )
    assert accepted().beside == BesideLora()
    assert accepted(trainable_token_indices=[7, 3]).beside.token_rows == {"": (7, 3)}


@pytest.mark.parametrize(
    "change",
    [
        {"lora_dropout": math.nan},
        {"inference_mode": False},
        {"fan_in_fan_out": True},
        {"layers_to_transform": 1},
        {"layers_pattern": "layers"},
        {"exclude_modules": ["k_proj"]},
        {"megatron_config": {"a": 1}},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"revision": "main"},
        {"base_model_name_or_path": "../../etc"},
        {"base_model_name_or_path": None},
        {"qalora_group_size": 16},
    ],
)
def test_field_without_effect_is_neither_refused_nor_warned_about(change: dict[str, Any]):
    _, report = parse(**change)
    assert (report.reasons, report.warnings) == ((), ())


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "orthogonal", "eva", "mica"])
def test_initialisation_that_leaves_the_base_alone_is_served(init: object):
    accepted(init_lora_weights=init)


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "novel", [], 3]
)
def test_other_initialisation_is_refused(init: object):
    assert "init_lora_weights" in refusal(init_lora_weights=init)


@pytest.mark.parametrize("value", [None, False, {}, [], ""])
def test_unknown_field_that_is_unset_is_a_warning(value: object):
    _, report = parse(use_hyperlora=value)
    assert not report.refused
    assert "use_hyperlora" in report.warnings[0]


@pytest.mark.parametrize("value", [True, 0, 1, "x", {"a": None}])
def test_unknown_field_that_is_set_is_refused_by_name(value: object):
    assert "use_superlora" in refusal(use_superlora=value)


def parse_leniently(**change: Any) -> tuple[PeftConfig | None, Report]:
    report = Report(lenient=True)
    return parse_config(json.dumps(lora_config(**change)).encode(), report), report


def test_lenience_makes_a_warning_of_each_unknown_field_that_is_set():
    config, report = parse_leniently(use_superlora=True, gamma=0.5, unset=None)
    assert config is not None
    assert config.rank_and_scale(Q) == accepted().rank_and_scale(Q)
    assert report.reasons == ()
    assert report.warnings == (
        "unknown field use_superlora in adapter_config.json is set, but ignored (lenient)",
        "unknown field gamma in adapter_config.json is set, but ignored (lenient)",
        "unknown fields in adapter_config.json are not set, so ignored: unset",
    )


@pytest.mark.parametrize("name", [*REFUSED_WHEN_LIVE, *sorted(HONOURED - {"target_modules"})])
def test_lenience_lets_no_known_field_through(name: str):
    wrong = {"nobody": ["knows"]}
    assert parse(**{name: wrong})[1].reasons == parse_leniently(**{name: wrong})[1].reasons != ()


@pytest.mark.parametrize("targets", [3, True, {"q_proj": 1}, ["q_proj", 3]])
def test_target_modules_of_a_wrong_type_are_refused(targets: object):
    assert "target_modules must be" in refusal(target_modules=targets)


@pytest.mark.parametrize("targets", [None, "all-linear", "(.*a)*(.*b)*$x", "("])
def test_target_modules_as_text_are_never_run(targets: object):
    assert accepted(target_modules=targets).targets == ()


def test_targets_listed_twice_count_once():
    assert accepted(target_modules=["a", "b", "a"]).targets == ("a", "b")


def test_all_findings_come_together():
    text = refusal(r=0, bias="some", use_superlora=True, task_type="SEQ_CLS")
    assert all(word in text for word in ("r must", "bias must", "use_superlora", "SEQ_CLS"))


# Files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "is empty"),
        (b" ", "not JSON"),
        (b'{"r": 8,', "line 1, column"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff\xfe{\x00", "UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", "Git LFS pointer"),
        (b"<html><body>not found", "web page"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deep"),
        (b'{"r": ' + b"9" * 5000 + b"}", "too long"),
    ],
)
def test_what_is_no_json_object_is_malformed(data: bytes, word: str):
    with pytest.raises(MalformedFile, match=word):
        parse_config(data, Report())


def test_byte_order_mark_is_skipped():
    data = b"\xef\xbb\xbf" + json.dumps(lora_config()).encode()
    assert parse_config(data, Report()) is not None


@pytest.mark.parametrize(
    ("data", "word"), [(None, "missing"), (b" " * (5 << 20), "too large"), (b"{", "not JSON")]
)
def test_unreadable_file_is_a_finding(data: bytes | None, word: str, tmp_path: Path):
    if data is not None:
        (tmp_path / "adapter_config.json").write_bytes(data)
    report = Report()
    assert read_config(tmp_path, report) is None
    assert "adapter_config.json" in report.reasons[0]
    assert word in report.reasons[0]


def test_the_documents_say_what_becomes_of_every_field():
    page = (REPOSITORY / "docs" / "adapters.md").read_text(encoding="utf-8")
    table = page.partition("## Every field")[2].partition("\n## ")[0]
    assert [name for name in sorted(fields.KNOWN) if f"`{name}`" not in table] == []
    known_to_peft = {field.name for field in dataclasses.fields(LoraConfig)}
    assert [name for name in sorted(known_to_peft) if f"`{name}`" not in table] == []
