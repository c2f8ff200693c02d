"""Each model's text by its own codec."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import pytest

from loramux.testing import FakeCodec, FakeEngine

pytestmark = pytest.mark.anyio


class Shifted(FakeCodec):
    """Another vocabulary: each token is the code point after the character's."""

    def encode(self, text: str) -> list[int]:
        return [token + 1 for token in super().encode(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return super().decode([token - 1 for token in token_ids])


@pytest.fixture(autouse=True)
def codec(engine: FakeEngine) -> Shifted:
    codec = engine.codecs["shout"] = Shifted(key="shifted")
    return codec


@pytest.mark.parametrize(("model", "tokens"), [("base", [97, 98]), ("shout", [98, 99])])
async def test_prompts_become_tokens_of_their_model(
    client: httpx.AsyncClient, engine: FakeEngine, model: str, tokens: list[int]
) -> None:
    body = {"model": model, "prompt": "ab", "max_tokens": 1, "logprobs": 0, "echo": True}
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    assert engine.requests[-1].prompt_token_ids == tokens
    assert answer["choices"][0]["logprobs"]["tokens"][:2] == ["a", "b"]


@pytest.mark.parametrize(("model", "first"), [("base", ord("u")), ("shout", ord("u") + 1)])
async def test_chats_become_tokens_of_their_model(
    client: httpx.AsyncClient, engine: FakeEngine, model: str, first: int
) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    assert engine.requests[-1].prompt_token_ids[0] == first


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "ab"}),
    ],
)
async def test_a_prompt_for_a_codec_that_is_gone_is_sent_back(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    codec: Shifted,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    prompt: dict[str, object],
) -> None:
    encode = codec.encode

    def replace_meanwhile(text: str) -> list[int]:
        engine.codecs["shout"] = Shifted(key="shifted again")
        return encode(text)

    monkeypatch.setattr(codec, "encode", replace_meanwhile)
    response = await client.post(path, json={"model": "shout", **prompt})
    assert response.status_code == 409
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("adapter_replaced", "invalid_request_error")
    assert engine.requests == []
