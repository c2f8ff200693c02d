"""What a guide may be, before anybody compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loramux import Guide, SamplingParams
from loramux.errors import InvalidRequest
from loramux.guide import MAX_BYTES


def test_a_schema_may_be_an_object_or_its_text() -> None:
    assert Guide.json({"type": "object"}) == Guide.json('{"type": "object"}')


def test_the_order_of_a_schema_is_kept() -> None:
    assert Guide.json({"b": 1, "a": 2}).text == '{"b": 1, "a": 2}'


def test_choices_come_back_as_they_were() -> None:
    choices = ['"', "\\", "\n", "é", "\x7f"]
    assert Guide.choice(choices).choices() == choices


def test_what_a_request_calls_it_makes_no_other_guide() -> None:
    assert Guide.regex("a", "guided_regex") == Guide.regex("a", "other")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Guide("xml", "a", "it"), "'xml' is no kind of guide"),  # type: ignore[arg-type]
        (lambda: Guide.regex("", "it"), "not empty"),
        (lambda: Guide.regex(5, "it"), "must be text"),  # type: ignore[arg-type]
        (lambda: Guide.grammar("\ud83d", "it"), "surrogate"),
        (lambda: Guide.json("{", "it"), "not valid JSON"),
        (lambda: Guide.json("[" * 5000, "it"), "nested too deeply"),
        (lambda: Guide.json("[1]", "it"), "an object"),
        (lambda: Guide.json({"minimum": float("nan")}, "it"), "cannot be written as JSON"),
        (lambda: Guide.json({"enum": [b"a"]}, "it"), "cannot be written as JSON"),
        (lambda: Guide.choice([], "it"), "one choice or more"),
        (lambda: Guide.choice(["a", ""], "it"), "not empty"),
        (lambda: Guide.choice(["a", 5], "it"), "must hold strings"),  # type: ignore[list-item]
    ],
)
def test_what_can_be_no_guide_is_refused_by_name(make: Callable[[], Guide], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s)it.*{reason}|{reason}") as refused:
        make()
    assert refused.value.param == "it"


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_a_long_text_is_refused(kind: Any) -> None:
    limit = MAX_BYTES[kind]
    Guide(kind, "a" * limit)
    with pytest.raises(InvalidRequest, match=f"{limit + 1} bytes, the limit is {limit}"):
        Guide(kind, "a" * (limit + 1))


@pytest.mark.parametrize(
    "part",
    [
        {"pattern": "a" * 8193},
        {"patternProperties": {"a" * 8193: {}}},
        {"items": {"properties": {"a": {"pattern": "a" * 8193}}}},
    ],
    ids=["pattern", "names", "inside"],
)
def test_a_schema_may_not_hold_a_longer_pattern_than_a_regex(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="pattern of more than 8192"):
        Guide.json(part)


def test_what_only_looks_like_a_pattern_is_allowed() -> None:
    Guide.json({"properties": {"pattern": {"type": "string"}}, "patternProperties": None})


def test_sampling_takes_a_guide_and_nothing_else() -> None:
    guide = Guide.choice(["yes"])
    assert SamplingParams(guide=guide).guide is guide
    with pytest.raises(InvalidRequest, match="must be a Guide") as refused:
        SamplingParams(guide="yes")  # type: ignore[arg-type]
    assert refused.value.param == "guide"


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 1}], ids=str)
def test_what_goes_on_after_the_end_contradicts_a_guide(other: dict[str, Any]) -> None:
    [name] = other
    with pytest.raises(InvalidRequest, match=f"{name} and guided_regex contradict") as refused:
        SamplingParams(guide=Guide.regex("a", "guided_regex"), **other)
    assert refused.value.param == name
