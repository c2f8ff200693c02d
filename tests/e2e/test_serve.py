"""The real server over the real engine, through the real client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.server_process import ServerProcess, serve
from tests.golden.load import BASE, Golden

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def server(tiny_base: Path, tiny_adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    with serve(
        tiny_base,
        tiny_adapters,
        "--served-model-name=base",
        "--max-loras=3",
        "--dtype=float32",
        "--threads=1",
    ) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(server: ServerProcess, name: str) -> float:
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 20
    while metric(server, "loramux_requests_running") or metric(server, "loramux_requests_waiting"):
        assert time.monotonic() < deadline, "requests are left over"
        time.sleep(0.02)
    assert metric(server, "loramux_kv_blocks_used") == 0


def test_models_lists_the_base_and_its_adapters(
    client: openai.OpenAI, tiny_adapters: dict[str, Path]
) -> None:
    models = {model.id: model for model in client.models.list()}
    assert models.keys() == {"base", *tiny_adapters}
    assert models["cat"].model_dump()["parent"] == "base"


def test_each_listed_name_answers_as_golden(client: openai.OpenAI, tiny_golden: Golden) -> None:
    for name in tiny_golden.outputs:
        for prompt_id, prompt in tiny_golden.prompts.items():
            answer = client.completions.create(
                model=name,
                prompt=list(prompt.input_ids),
                temperature=0,
                max_tokens=NEW_TOKENS,
                extra_body={"return_token_ids": True},
            )
            expected = tiny_golden.outputs[name][prompt_id]
            [choice] = answer.choices
            assert choice.model_dump()["token_ids"] == list(expected.output_ids)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(expected.output_ids)


def test_concurrent_streams_of_all_adapters_concatenate_to_the_golden_texts(
    server: ServerProcess, tiny_golden: Golden
) -> None:
    rows = [(name, prompt) for name in tiny_golden.outputs for prompt in tiny_golden.prompts]

    async def stream(client: openai.AsyncOpenAI, name: str, prompt: str) -> str:
        chunks = await client.completions.create(
            model=name,
            prompt=list(tiny_golden.prompts[prompt].input_ids),
            temperature=0,
            max_tokens=NEW_TOKENS,
            stream=True,
        )
        text = ""
        async for chunk in chunks:
            for choice in chunk.choices:
                assert "\N{REPLACEMENT CHARACTER}" not in choice.text
                text += choice.text
        return text

    async def all_streams() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return list(await asyncio.gather(*(stream(client, *row) for row in rows)))

    texts = asyncio.run(all_streams())
    assert texts == [tiny_golden.outputs[name][prompt].text for name, prompt in rows]
    assert metric(server, "loramux_step_adapters_max") == 3


def test_a_base_without_a_chat_template_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="chat template"):
        client.chat.completions.create(model=BASE, messages=[{"role": "user", "content": "Hi"}])


def test_an_adapter_can_be_loaded_and_unloaded_while_streams_run(
    server: ServerProcess,
    client: openai.OpenAI,
    tiny_adapters: dict[str, Path],
    tiny_golden: Golden,
) -> None:
    prompt = list(tiny_golden.prompts["0"].input_ids)
    running = client.completions.create(
        model="queen", prompt=prompt, temperature=0, max_tokens=NEW_TOKENS, stream=True
    )
    first = next(iter(running))
    body = {"lora_name": "late", "lora_path": str(tiny_adapters["rabbit"])}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code == 200
    late = client.completions.create(
        model="late", prompt=prompt, temperature=0, max_tokens=NEW_TOKENS
    )
    assert late.choices[0].text == tiny_golden.outputs["rabbit"]["0"].text
    httpx.post(
        f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "late"}
    ).raise_for_status()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="late", prompt=prompt)
    text = first.choices[0].text + "".join(c.choices[0].text for c in running if c.choices)
    assert text == tiny_golden.outputs["queen"]["0"].text


def test_a_client_that_goes_away_frees_its_request(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    aborted = metric(server, "loramux_requests_aborted_total")
    body = {"model": "cat", "prompt": [5], "max_tokens": 120, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until_idle(server)
    assert metric(server, "loramux_requests_aborted_total") == aborted + 1


BAD = [
    ({"model": "nobody", "prompt": "A"}, 404, "nobody"),
    ({"model": "base", "prompt": ""}, 400, "empty"),
    ({"model": "base", "prompt": [1] * 500, "max_tokens": 4}, 400, "context"),
    ({"model": "base", "prompt": "A", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": "base", "prompt": "A", "max_tokens": 5000}, 400, "max_tokens"),
    ({"model": "base", "prompt": "A", "temperature": -1}, 400, "temperature"),
    ({"model": "base", "prompt": [99999]}, 400, "99999"),
    ({"model": "base", "prompt": [-1]}, 400, "-1"),
    ({"model": "base", "prompt": "A", "frobnicate": 1}, 400, "frobnicate"),
]


@pytest.mark.parametrize(("body", "status", "word"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_gets_a_typed_error_and_the_engine_goes_on(
    server: ServerProcess, tiny_golden: Golden, body: dict[str, object], status: int, word: str
) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert word in error["message"]
    assert error.keys() >= {"message", "type", "param", "code"}
    good = {
        "model": "hatter",
        "prompt": list(tiny_golden.prompts["1"].input_ids),
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=good).raise_for_status().json()
    assert answer["choices"][0]["text"] == tiny_golden.outputs["hatter"]["1"].text


def test_a_refused_adapter_names_every_reason_and_is_not_there(
    server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 0, "use_mora": 1}')
    body = {"lora_name": "bad", "lora_path": str(tmp_path)}
    response = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "use_mora" in message
    assert "r must be" in message
    missing = {"lora_name": "bad", "lora_path": str(tmp_path / "nowhere")}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=missing).status_code == 404


def test_a_signal_ends_the_server_with_exit_code_zero(tiny_base: Path) -> None:
    with serve(tiny_base, {}, "--threads=1") as running:
        assert running.stop() == 0


def test_a_bad_adapter_at_start_is_one_line_and_exit_code_one(
    tiny_base: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(AssertionError, match="error: adapter 'x'"),
        serve(tiny_base, {"x": tmp_path}, "--threads=1"),
    ):
        pass


def test_logit_bias_is_honoured_for_base_and_adapter(
    client: openai.OpenAI, tiny_adapters: dict[str, Path]
) -> None:
    for model in ("base", next(iter(tiny_adapters))):
        answer = client.completions.create(
            model=model,
            prompt=[5, 6, 7],
            max_tokens=6,
            temperature=1.0,
            logit_bias={"9": 100},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert answer.choices[0].model_dump()["token_ids"] == [9] * 6


def test_sigterm_under_load_loses_no_request_that_was_taken(
    tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    names = ["base", *tiny_adapters]
    options = ("--served-model-name=base", "--max-loras=2", "--dtype=float32", "--threads=1")

    async def load(server: ServerProcess) -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            begun = asyncio.Event()
            num_begun = 0

            async def ask(name: str) -> list[str]:
                nonlocal num_begun
                stream = await client.completions.create(
                    model=name,
                    prompt=[5, 6, 7],
                    max_tokens=40,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                num_begun += 1
                if num_begun == NUM_STREAMS:
                    begun.set()
                return [c.choices[0].finish_reason or "" async for c in stream if c.choices]

            tasks = [asyncio.create_task(ask(names[i % len(names)])) for i in range(NUM_STREAMS)]
            await begun.wait()
            server.process.terminate()
            return await asyncio.gather(*tasks)

    with serve(tiny_base, tiny_adapters, *options) as server:
        answers = asyncio.run(load(server))
        assert server.process.wait(timeout=60) == 0
    assert [reasons[-1] for reasons in answers] == ["length"] * NUM_STREAMS


NUM_STREAMS = 24
