"""``loramux serve --registry``: what was changed over HTTP is there after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai

from tests.e2e.server_process import ServerProcess, serve
from tests.golden.load import Golden


def told(server: ServerProcess, method: str, path: str, **body: Any) -> Any:
    response = httpx.request(method, f"{server.url}{path}", json=body or None, timeout=30)
    assert response.is_success, response.text
    return response.json()


def assert_golden(server: ServerProcess, name: str, golden: Golden) -> None:
    prompt_id, prompt = next(iter(golden.prompts.items()))
    expected = golden.outputs[name][prompt_id].output_ids
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=name,
            prompt=list(prompt.input_ids),
            temperature=0,
            max_tokens=len(expected),
            extra_body={"return_token_ids": True},
        )
    assert answer.choices[0].model_dump()["token_ids"] == list(expected)


def test_adapters_survive_a_restart_and_are_read_when_they_are_asked_for(
    tiny_base: Path, tiny_adapters: dict[str, Path], tiny_golden: Golden, tmp_path: Path
) -> None:
    options = (
        "--served-model-name=base",
        "--max-loras=2",
        "--dtype=float32",
        "--threads=1",
        f"--registry={tmp_path / 'registry'}",
    )
    kept, gone, *_ = (name for name in tiny_adapters if name in tiny_golden.outputs)
    with serve(tiny_base, {}, *options) as server:
        for name in (kept, gone):
            told(server, "POST", "/v1/adapters", name=name, source=str(tiny_adapters[name]))
        told(server, "PATCH", f"/v1/adapters/{kept}", pinned=True)
        told(server, "DELETE", f"/v1/adapters/{gone}")
        assert_golden(server, kept, tiny_golden)
        assert server.stop() == 0
    with serve(tiny_base, {}, *options) as server:
        [info] = told(server, "GET", "/v1/adapters")["data"]
        assert (info["name"], info["pinned"], info["tier"]) == (kept, True, "source")
        assert_golden(server, kept, tiny_golden)
        assert told(server, "GET", f"/v1/adapters/{kept}")["tier"] == "slot"
        told(server, "POST", "/v1/adapters", name=gone, source=str(tiny_adapters[gone]))
        server.process.kill()
        server.process.wait()
    with serve(tiny_base, {}, *options) as server:
        names = [info["name"] for info in told(server, "GET", "/v1/adapters")["data"]]
        assert names == [kept, gone], "after a kill, too"
        assert_golden(server, gone, tiny_golden)
