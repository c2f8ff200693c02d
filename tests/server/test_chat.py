from __future__ import annotations

from typing import Any

import httpx
import pytest

from loramux.server.app import create_app
from loramux.testing import FakeCodec, FakeEngine

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"model": "base", "messages": HI} | body)


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await post(client, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_conversation_goes_through_the_template(client: httpx.AsyncClient) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HI]
    answer = await chat(client, messages=messages)
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "system:be brief\nuser:hi\n",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"


async def test_adapter_is_chosen_by_model_name(client: httpx.AsyncClient) -> None:
    answer = await chat(client, model="shout")
    assert answer["choices"][0]["message"]["content"] == "USER:HI\n"


async def test_text_parts_are_joined_by_line_breaks(client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await chat(client, messages=[{"role": "user", "content": parts}])
    assert answer["choices"][0]["message"]["content"] == "user:a\nb\n"


async def test_developer_is_the_system_role(client: httpx.AsyncClient) -> None:
    answer = await chat(client, messages=[{"role": "developer", "content": "x"}])
    assert answer["choices"][0]["message"]["content"] == "system:x\n"


async def test_our_own_message_can_be_sent_back(client: httpx.AsyncClient) -> None:
    message = (await chat(client))["choices"][0]["message"]
    await chat(client, messages=[*HI, message, *HI])


async def test_output_is_unbounded_by_default(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await chat(client)
    assert engine.requests[0].params.max_tokens is None


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_work(client: httpx.AsyncClient, field: str) -> None:
    answer = await chat(client, **{field: 3})
    assert answer["choices"][0]["message"]["content"] == "use"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_n_choices(client: httpx.AsyncClient) -> None:
    answer = await chat(client, n=3, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_logprobs_have_the_chat_shape(client: httpx.AsyncClient) -> None:
    answer = await chat(client, logprobs=True, top_logprobs=2, max_tokens=1)
    u = {"token": "u", "logprob": -0.5, "bytes": [117]}
    v = {"token": "v", "logprob": -1.5, "bytes": [118]}
    assert answer["choices"][0]["logprobs"] == {
        "content": [{**u, "top_logprobs": [u, v]}],
        "refusal": None,
    }


async def test_logprobs_without_top_logprobs(client: httpx.AsyncClient) -> None:
    answer = await chat(client, logprobs=True, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_fields_stand_beside_the_choices(client: httpx.AsyncClient) -> None:
    answer = await chat(client, return_token_ids=True, prompt_logprobs=0, max_tokens=1)
    assert answer["prompt_token_ids"] == [ord(c) for c in "user:hi\n"]
    assert answer["choices"][0]["token_ids"] == [ord("u")]
    assert answer["prompt_logprobs"][:2] == [
        None,
        {"115": {"logprob": -0.5, "decoded_token": "s"}},
    ]


async def test_fields_that_ask_for_nothing_pass(client: httpx.AsyncClient) -> None:
    await chat(
        client,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias=None,
        store=False,
        parallel_tool_calls=True,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("reasoning_effort", "high"),
    ],
)
async def test_unsupported_field_is_refused_by_name(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    response = await post(client, **{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": "Al"}]}, "messages.0.name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
async def test_bad_value_is_refused_by_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await post(client, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_conversation_that_is_too_long_is_refused_by_name(client: httpx.AsyncClient) -> None:
    response = await post(client, messages=[{"role": "user", "content": "a" * 5000}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_model_without_chat_template_is_a_400() -> None:
    app = create_app(FakeEngine(codec=FakeCodec(chat_template=False)))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        response = await post(client)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]
