"""Guides through HTTP and the real engine, with an adapter and a vocabulary of all bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.config import EngineOptions, ServerOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.engine.build import assemble
from loramux.model.anatomy import examine
from loramux.model.attention_seam import AttentionSeam
from loramux.model.load import adopt
from loramux.server.app import create_app
from loramux.testing import random_adapter, tiny_model
from tests.cpu.engines import async_engine

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "score": {"type": "integer", "minimum": -9, "maximum": 99},
        "word": {"type": "string", "maxLength": 3},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["mood", "score", "word", "tags"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
}
CHOICES = ["left", "right", "straight on"]


def check_object(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["mood", "score", "word", "tags"]
    assert found["mood"] in ("good", "bad")
    assert type(found["score"]) is int
    assert -9 <= found["score"] <= 99
    assert isinstance(found["word"], str)
    assert len(found["word"]) <= 3
    assert len(found["tags"]) <= 2
    assert all(isinstance(tag, bool) for tag in found["tags"])


class Bench:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def chat(self, model: str = "tiny", **how: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": model, "messages": messages, "temperature": 0, **how}
        return await self.client.post("/v1/chat/completions", json=body)

    async def answer(self, model: str = "tiny", **how: Any) -> dict[str, Any]:
        [choice] = (await self.chat(model, **how)).raise_for_status().json()["choices"]
        return choice

    async def complete(self, **how: Any) -> list[dict[str, Any]]:
        body = {"model": "tiny", "prompt": "ab", "temperature": 0, "max_tokens": 60, **how}
        response = await self.client.post("/v1/completions", json=body)
        return response.raise_for_status().json()["choices"]


@pytest.fixture
async def bench(byte_level: Any, tmp_path: Path) -> AsyncIterator[Bench]:
    model = tiny_model(vocab_size=310, max_positions=400)
    model.config.eos_token_id = model.generation_config.eos_token_id = 295  # 2 is a byte here
    twin = adopt("twin", tiny_model(vocab_size=310))
    layout = examine(twin, AttentionSeam(twin.model)).layout
    random_adapter(tmp_path / "a", layout, rank=4, targets=("q_proj", "down_proj"), seed=1)
    parts = assemble(adopt("tiny", model), byte_level, EngineOptions(), "tiny")
    engine: AsyncEngine = async_engine(parts, max_open=50, sources=parts.sources)
    await engine.start()
    await engine.load_adapter("a", str(tmp_path / "a"))
    transport = httpx.ASGITransport(create_app(engine, options=ServerOptions(stream_interval=0)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Bench(client)
    await engine.stop()
    parts.core.check()


async def test_requests_of_all_kinds_at_once_are_each_answered_by_their_guide(bench: Bench) -> None:
    plain = {"max_tokens": 30, "return_token_ids": True}
    alone = [await bench.answer(model, **plain) for model in ("tiny", "a")]
    drawn = {"temperature": 1.5, "seed": 5}
    objects, choices, regexes, beside = [], [], [], []
    async with asyncio.TaskGroup() as tasks:
        for model in ("tiny", "a"):
            for how in ({}, drawn):
                asked = {"response_format": FORMAT, **how}
                objects.append(tasks.create_task(bench.answer(model, **asked)))
                asked = {"guided_choice": CHOICES, **how}
                choices.append(tasks.create_task(bench.answer(model, **asked)))
                asked = {"guided_regex": "x[0-9]{3}y", **how}
                regexes.append(tasks.create_task(bench.answer(model, **asked)))
            beside.append(tasks.create_task(bench.answer(model, **plain)))
    for task in objects:
        check_object(task.result()["message"]["content"])
        assert task.result()["finish_reason"] == "stop"
    for task in choices:
        assert task.result()["message"]["content"] in CHOICES
    for task in regexes:
        text = task.result()["message"]["content"]
        assert (text[0], text[1:4].isdecimal(), text[4:]) == ("x", True, "y")
    assert [task.result() for task in beside] == alone
    assert "".join(answer["message"]["content"] for answer in alone)


async def test_a_stream_is_the_same_answer_in_pieces(bench: Bench) -> None:
    whole = await bench.answer(response_format=FORMAT)
    response = await bench.chat(response_format=FORMAT, stream=True)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert len(chunks) > 20
    text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
    assert text == whole["message"]["content"]
    assert chunks[-1]["finish_reason"] == "stop"


async def test_an_answer_that_is_cut_off_says_so(bench: Bench) -> None:
    choice = await bench.answer(response_format=FORMAT, max_tokens=5)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


async def test_json_objects_need_no_schema(bench: Bench) -> None:
    choice = await bench.answer(response_format={"type": "json_object"})
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)


async def test_each_prompt_and_each_of_n_has_its_own_way_through_the_guide(bench: Bench) -> None:
    choices = await bench.complete(
        prompt=["ab", "cd"], n=3, temperature=2.0, seed=1, guided_json=SCHEMA, max_tokens=250
    )
    assert len(choices) == 6
    for choice in choices:
        check_object(choice["text"])
    assert len({choice["text"] for choice in choices}) > 1


async def test_a_grammar_guides_a_completion(bench: Bench) -> None:
    [choice] = await bench.complete(guided_grammar='start: "(" ("a" | "b") ")"')
    assert choice["text"] in ("(a)", "(b)")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_json": {"type": "strng"}}, "guided_json", "Invalid type: strng"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "a", "schema": {"not": {"type": "string"}}}}},
            "response_format",
            "not",
        ),
    ],
    ids=["schema", "regex", "grammar", "format"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_followed_is_a_400_and_harms_nobody(
    bench: Bench, fields: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    response = await bench.chat(stream=stream, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert (await bench.answer(guided_choice=["yes"]))["message"]["content"] == "yes"
