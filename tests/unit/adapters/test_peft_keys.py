from __future__ import annotations

import pytest

from loramux.adapters.formats.peft_keys import DeltaKey, ParameterKey, describe_other, parse_key

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "part", "adapter"),
    [
        (f"base_model.model.{Q}.lora_A.weight", "lora_A", None),
        (f"{Q}.lora_B.weight", "lora_B", None),
        (f"base_model.model.{Q}.lora_A.default.weight", "lora_A", "default"),
        (f"base_model.model.{Q}.lora_magnitude_vector", "lora_magnitude_vector", None),
        (f"base_model.model.{Q}.lora_magnitude_vector.weight", "lora_magnitude_vector", None),
        (f"{Q}.lora_magnitude_vector.default", "lora_magnitude_vector", "default"),
        (f"{Q}.lora_magnitude_vector.default.weight", "lora_magnitude_vector", "default"),
        (f"{Q}.lora_B.bias", "lora_B.bias", None),
        (f"{Q}.lora_B.default.bias", "lora_B.bias", "default"),
    ],
)
def test_spellings_of_a_delta(key: str, part: str, adapter: str | None):
    parsed = parse_key(key)
    assert isinstance(parsed, DeltaKey)
    assert not parsed.of_embedding
    assert (parsed.path, parsed.part, parsed.adapter) == (Q, part, adapter)


def test_headless_path_keeps_its_own_form():
    parsed = parse_key("base_model.model.layers.0.mlp.up_proj.lora_A.weight")
    assert parsed == DeltaKey("layers.0.mlp.up_proj", "lora_A", None)


@pytest.mark.parametrize(
    ("key", "part", "adapter"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_A", None),
        ("model.embed_tokens.lora_embedding_B.default", "lora_B", "default"),
    ],
)
def test_lora_on_an_embedding_has_words_of_its_own(key: str, part: str, adapter: str | None):
    parsed = parse_key(key)
    assert parsed == DeltaKey("model.embed_tokens", part, adapter, of_embedding=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (f"base_model.model.{Q}.base_layer.bias", (Q, "bias", "base layer")),
        (f"{Q}.bias", (Q, "bias", "own")),
        ("base_model.model.lm_head.weight", ("lm_head", "weight", "own")),
        ("base_model.model.lm_head.modules_to_save.weight", ("lm_head", "weight", "copy")),
        ("lm_head.modules_to_save.default.weight", ("lm_head", "weight", "copy")),
        ("lm_head.original_module.weight", ("lm_head", "weight", "original")),
        ("wte.token_adapter.base_layer.weight", ("wte", "weight", "base layer")),
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
            ("model.embed_tokens", "weight", "tokens"),
        ),
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta.default",
            ("model.embed_tokens", "weight", "tokens"),
        ),
    ],
)
def test_values_for_parameters_of_the_base(key: str, expected: tuple[str, str, str]):
    parsed = parse_key(key)
    assert isinstance(parsed, ParameterKey)
    assert (parsed.path, parsed.parameter, parsed.origin) == expected


@pytest.mark.parametrize(
    ("key", "word"),
    [
        (f"{Q}.lora_A.bias", "unknown kind"),
        (f"{Q}.lora_a", "mlx-lm"),
        ("base_model.model.score.modules_to_save.weight", "score"),
        (f"{Q}.lora_E", "AdaLoRA"),
        (f"{Q}.lora_C.weight", "unknown kind"),
        (f"{Q}.hada_w1_a", "unknown kind"),
        ("", "unknown kind"),
    ],
)
def test_other_tensors_are_described_for_an_operator(key: str, word: str):
    assert parse_key(key) is None
    assert word in describe_other(key)
