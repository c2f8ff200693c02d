"""Guides in requests: which fields ask for one, and what each becomes."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from loramux import Guide
from loramux.errors import MissingPackage
from loramux.testing import FakeCodec, FakeEngine

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
PATHS = {"/v1/completions": {"prompt": "hi"}}
PATHS["/v1/chat/completions"] = {"messages": [{"role": "user", "content": "hi"}]}  # type: ignore[dict-item]
CHAT = "/v1/chat/completions"


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, json={"model": "base", **PATHS[path], **fields})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value", "guide"),
    [
        ("guided_json", SCHEMA, Guide.json(SCHEMA)),
        ("guided_json", '{"type": "array"}', Guide.json('{"type": "array"}')),
        ("guided_regex", "[a-z]+", Guide.regex("[a-z]+")),
        ("guided_choice", ["yes", "no"], Guide.choice(["yes", "no"])),
        ("guided_grammar", 'start: "a"', Guide.grammar('start: "a"')),
    ],
)
async def test_both_endpoints_take_the_fields_of_vllm(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, field: str, value: Any, guide: Guide
) -> None:
    (await post(client, path, **{field: value})).raise_for_status()
    [request] = engine.requests
    assert request.params.guide == guide
    assert request.params.guide.param == field


@pytest.mark.parametrize(
    ("value", "guide"),
    [
        ({"type": "text"}, None),
        (None, None),
        ({"type": "json_object"}, Guide.json({"type": "object"})),
        (FORMAT, Guide.json(SCHEMA)),
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": SCHEMA,
                    "strict": True,
                    "description": "an answer",
                },
            },
            Guide.json(SCHEMA),
        ),
    ],
)
async def test_chats_take_a_response_format(
    client: httpx.AsyncClient, engine: FakeEngine, value: Any, guide: Guide | None
) -> None:
    (await post(client, CHAT, response_format=value)).raise_for_status()
    [request] = engine.requests
    assert request.params.guide == guide


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "xml"}, "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema.json_schema"),
        ({"type": "json_object", "schema": {}}, "response_format.json_object.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
            "response_format.json_schema.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.json_schema.schema",
        ),
    ],
)
async def test_a_response_format_of_another_shape_is_refused(
    client: httpx.AsyncClient, value: Any, param: str
) -> None:
    response = await post(client, CHAT, response_format=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_completions_have_no_response_format(client: httpx.AsyncClient) -> None:
    response = await post(client, "/v1/completions", response_format={"type": "json_object"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


async def test_several_guides_exclude_each_other(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await post(
        client, CHAT, guided_regex="a", guided_choice=["a"], response_format=FORMAT
    )
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "guided_regex and guided_choice and response_format exclude each other" in message
    assert engine.requests == []


async def test_a_plain_format_excludes_nothing(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"guided_regex": "a", "response_format": {"type": "text"}}
    (await post(client, CHAT, **body)).raise_for_status()
    assert engine.requests[0].params.guide == Guide.regex("a")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "bad"}, "guided_regex"),
        ({"guided_regex": "bad", "stream": True}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "a" * 20_000}, "guided_grammar"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ],
    ids=str,
)
async def test_a_guide_that_cannot_be_followed_is_refused_by_its_name(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await post(client, path, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


class Watched(FakeCodec):
    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []
        self.missing = False

    def compile(self, guide: Guide) -> Any:
        self.threads.append(threading.current_thread())
        if self.missing:
            raise MissingPackage("llguidance", "guides need it")
        return super().compile(guide)


@pytest.mark.parametrize("path", PATHS)
async def test_a_guide_is_compiled_outside_of_the_event_loop(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.text = codec = Watched()
    prompts = {"prompt": ["a", "b"]} if path == "/v1/completions" else {}
    (await post(client, path, guided_choice=["yes"], **prompts)).raise_for_status()
    assert len(codec.threads) == (2 if prompts else 1)
    assert threading.current_thread() not in codec.threads


async def test_without_llguidance_the_answer_says_what_to_install(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.text = codec = Watched()
    codec.missing = True
    response = await post(client, CHAT, guided_choice=["yes"])
    assert response.status_code == 501
    assert "pip install llguidance" in response.json()["error"]["message"]
