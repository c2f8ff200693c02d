from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from loramux.server.app import create_app
from loramux.testing import FakeEngine

pytestmark = pytest.mark.anyio


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/v1/completions", json={"model": "base", "prompt": "abc"} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_base_model_answers(client: httpx.AsyncClient) -> None:
    answer = await complete(client)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "base"
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert choice["logprobs"] is None


async def test_adapter_is_chosen_by_model_name(client: httpx.AsyncClient) -> None:
    answer = await complete(client, model="shout")
    assert answer["model"] == "shout"
    assert answer["choices"][0]["text"] == "ABC"


async def test_max_tokens_is_16_by_default(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="a" * 40)
    assert answer["choices"][0]["text"] == "a" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
async def test_prompt_forms(client: httpx.AsyncClient, prompt: Any, texts: list[str]) -> None:
    answer = await complete(client, prompt=prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts


async def test_choices_are_numbered_by_prompt_then_n(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=["ab", "c"], n=2)
    numbered = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert numbered == [(0, "ab"), (1, "ab"), (2, "c"), (3, "c")]


async def test_usage_counts_a_prompt_once_and_every_output_token(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=["ab", "c"], n=2)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_logprobs_have_the_legacy_shape(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="ad", logprobs=2)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "d"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"d": -0.5, "e": -1.5}],
        "text_offset": [0, 1],
    }


async def test_logprobs_0_reports_the_chosen_token(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="a", logprobs=0)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient) -> None:
    answer = await complete(client, model="shout", prompt=["ab", "c"], echo=True)
    assert [choice["text"] for choice in answer["choices"]] == ["abAB", "cC"]


async def test_echo_of_token_ids_is_their_text(client: httpx.AsyncClient) -> None:
    answer = await complete(client, model="shout", prompt=[97], echo=True)
    assert answer["choices"][0]["text"] == "aA"


async def test_echo_with_logprobs_covers_the_prompt(client: httpx.AsyncClient) -> None:
    answer = await complete(client, model="shout", prompt="ab", echo=True, logprobs=0, n=2)
    for choice in answer["choices"]:
        assert choice["logprobs"]["tokens"] == ["a", "b", "A", "B"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert "prompt_logprobs" not in choice


async def test_prompt_logprobs_are_by_token_id(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="ad", prompt_logprobs=2)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "100": {"logprob": -0.5, "decoded_token": "d"},
            "101": {"logprob": -1.5, "decoded_token": "e"},
        },
    ]


async def test_token_ids_are_returned_on_request(client: httpx.AsyncClient) -> None:
    answer = await complete(client, model="shout", prompt="ab", return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [65, 66]
    assert answer["choices"][0]["prompt_token_ids"] == [97, 98]
    assert "token_ids" not in (await complete(client))["choices"][0]


async def test_every_sampling_field_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "min_tokens": 1,
        "max_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"70": -100, "5": 1.5},
        "logprobs": 4,
        "prompt_logprobs": 5,
    }
    await complete(client, **fields)
    params = engine.requests[0].params
    fields |= {"stop": ("x", "y"), "stop_token_ids": (3,), "logit_bias": ((5, 1.5), (70, -100))}
    assert {name: getattr(params, name) for name in fields} == fields


async def test_stop_may_be_one_string(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, stop="END")
    assert engine.requests[0].params.stop == ("END",)


async def test_null_means_the_default(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, temperature=None, stop=None, max_tokens=None, stream=None)
    assert engine.requests[0].params.temperature == 1.0
    assert engine.requests[0].params.max_tokens == 16


async def test_unsupported_fields_pass_where_they_ask_for_nothing(
    client: httpx.AsyncClient,
) -> None:
    await complete(client, suffix=None, best_of=1, logit_bias={}, user="someone")


async def test_a_refused_prompt_frees_the_ones_before_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"model": "base", "prompt": ["ab", ""]}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert engine.running == set()
    assert len(engine.aborted) == 1


async def test_prompts_run_at_the_same_time() -> None:
    engine = FakeEngine(tick_seconds=0.01)
    transport = httpx.ASGITransport(create_app(engine))
    most = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        call = asyncio.create_task(complete(client, prompt=["aaa", "bbb", "ccc"]))
        while not call.done():
            most = max(most, len(engine.running))
            await asyncio.sleep(0.002)
        await call
    assert most == 3
