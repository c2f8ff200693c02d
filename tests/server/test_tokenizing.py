"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.server.app import create_app
from loramux.testing import FakeEngine
from loramux.testing.codec import FakeCodec

pytestmark = pytest.mark.anyio


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    return await client.post(path, json=body)


async def test_tokens_are_those_of_a_completion(client: httpx.AsyncClient) -> None:
    answer = (await post(client, "/tokenize", model="base", prompt="abé")).json()
    assert answer["tokens"] == [97, 98, 233]
    assert (answer["count"], answer["max_model_len"]) == (3, 4096)
    assert answer["token_strs"] is None
    completion = await post(
        client, "/v1/completions", model="base", prompt="abé", return_token_ids=True
    )
    assert completion.json()["choices"][0]["prompt_token_ids"] == answer["tokens"]


async def test_tokens_are_those_of_a_chat(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = (await post(client, "/tokenize", messages=messages, return_token_strs=True)).json()
    chat = await post(
        client, "/v1/chat/completions", model="base", messages=messages, return_token_ids=True
    )
    assert answer["tokens"] == chat.json()["prompt_token_ids"]
    assert "".join(answer["token_strs"]) == "user:hi\n"


@pytest.mark.parametrize("text", ["abé", "x" * 30_000])
async def test_text_comes_back(client: httpx.AsyncClient, text: str) -> None:
    tokens = (await post(client, "/tokenize", prompt=text)).json()["tokens"]
    assert (await post(client, "/detokenize", tokens=tokens)).json() == {"prompt": text}


async def test_an_adapter_with_a_tokenizer_of_its_own_is_asked() -> None:
    class Backwards(FakeCodec):
        def encode(self, text: str) -> list[int]:
            return super().encode(text[::-1])

    engine = FakeEngine(adapters={"shout": "/a"})
    engine.codecs["shout"] = Backwards()
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        found = [
            (await post(client, "/tokenize", model=model, prompt="ab")).json()["tokens"]
            for model in ("base", "shout")
        ]
    assert found == [[97, 98], [98, 97]]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "nobody"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [2**31 - 1]}, 400, "does not have"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, 404, "nobody"),
    ],
)
async def test_what_cannot_be_done_is_told(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]
