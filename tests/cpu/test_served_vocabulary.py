"""An adapter with added tokens and a tokenizer of its own, through HTTP and the real engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from loramux.config import ServerOptions
from loramux.engine.async_engine import AsyncEngine
from loramux.server.app import create_app
from tests.cpu.architectures import build
from tests.cpu.engines import assemble_tiny, async_engine
from tests.cpu.test_adapter_text import added, grown_tokenizer
from tests.cpu.test_grown_vocabulary import GROWN, KINDS, VOCAB, write

pytestmark = pytest.mark.anyio

PROMPT = "5 <t161> 31"
TOKENS = [5, 161, 31]


@dataclass
class Bench:
    """A server with the adapter ``grown`` and the folder that it comes from."""

    client: httpx.AsyncClient
    engine: AsyncEngine
    folder: Path

    async def complete(self, prompt: Any, model: str = "grown", **how: Any) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8, **how}
        body.setdefault("return_token_ids", True)
        return await self.client.post("/v1/completions", json=body)

    async def choice(self, prompt: Any, **how: Any) -> dict[str, Any]:
        return (await self.complete(prompt, **how)).raise_for_status().json()["choices"][0]

    async def load(self, **how: Any) -> dict[str, Any]:
        body = {"lora_name": "grown", "lora_path": str(self.folder), **how}
        response = await self.client.post("/v1/load_lora_adapter", json=body)
        response.raise_for_status()
        [adapter] = (await self.client.get("/v1/adapters")).json()["data"]
        return adapter


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    write(KINDS["modules_to_save"], folder)
    return folder


@asynccontextmanager
async def running(adapter: Path, folder: Path, *, eos: int | None) -> AsyncIterator[Bench]:
    """``eos``: a token that ends texts in the adapter's tokenizer; None: it has no tokenizer."""
    shutil.copytree(adapter, folder)
    if eos is not None:
        grown_tokenizer(eos).save_pretrained(folder)
    parts = assemble_tiny(build("llama"))
    engine = async_engine(parts, max_open=50, sources=parts.sources)
    await engine.start()
    transport = httpx.ASGITransport(create_app(engine, options=ServerOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        bench = Bench(client, engine, folder)
        await bench.load()
        yield bench
    await engine.stop()
    parts.core.check()


async def first_added(bench: Bench) -> tuple[int, int]:
    """A token beyond the base's that the answer has, and its place."""
    choice = await bench.choice(TOKENS, ignore_eos=True, max_tokens=16)
    found = [(t, i) for i, t in enumerate(choice["token_ids"]) if t >= VOCAB]
    assert found, "no added token is ever chosen: the test needs other weights"
    return found[0]


async def test_added_tokens_go_in_and_come_out_as_text(adapter: Path, tmp_path: Path) -> None:
    async with running(adapter, tmp_path / "a", eos=GROWN - 1) as bench:
        choice = await bench.choice(PROMPT, max_tokens=16, logprobs=3, ignore_eos=True)
        assert choice["prompt_token_ids"] == TOKENS
        tokens = [t for t in choice["token_ids"] if t != GROWN - 1]
        assert max(tokens) >= VOCAB
        assert choice["text"] == "".join(str(t) if t < VOCAB else added(t) for t in tokens)
        words = [str(t) if t < VOCAB else added(t) for t in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == words


async def test_its_end_of_text_stops_its_answers_and_no_others(
    adapter: Path, tmp_path: Path
) -> None:
    async with running(adapter, tmp_path / "a", eos=None) as bench:
        eos, place = await first_added(bench)
        whole = await bench.choice(TOKENS, max_tokens=16, ignore_eos=True)
        before = await bench.choice(TOKENS, max_tokens=16)
        assert place < len(before["token_ids"]), "the base's own end comes first"
        grown_tokenizer(eos).save_pretrained(bench.folder)
        await bench.load(load_inplace=True)
        after = await bench.choice(PROMPT, max_tokens=16)
        assert (after["finish_reason"], len(after["token_ids"])) == ("stop", place + 1)
        assert after["token_ids"] == before["token_ids"][: place + 1]
        assert added(eos) not in after["text"]
        ignored = await bench.choice(PROMPT, max_tokens=16, ignore_eos=True)
        assert ignored["token_ids"] == whole["token_ids"]


async def test_chats_are_written_by_its_own_template(adapter: Path, tmp_path: Path) -> None:
    async with running(adapter, tmp_path / "a", eos=GROWN - 1) as bench:
        (bench.folder / "chat_template.jinja").write_text("<t160> {{ messages[0].content }}")
        await bench.load(load_inplace=True)
        body = {
            "model": "grown",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 4,
            "return_token_ids": True,
        }
        answer = (await bench.client.post("/v1/chat/completions", json=body)).json()
        assert answer["prompt_token_ids"] == [160, *TOKENS]
        refused = await bench.client.post("/v1/chat/completions", json={**body, "model": "tiny"})
        assert "no chat template" in refused.json()["error"]["message"]


async def test_the_base_knows_neither_the_text_nor_the_tokens(
    adapter: Path, tmp_path: Path
) -> None:
    async with running(adapter, tmp_path / "a", eos=GROWN - 1) as bench:
        choice = await bench.choice(PROMPT, model="tiny")
        assert choice["prompt_token_ids"] == [5, 0, 31]
        for how in ({"prompt": TOKENS}, {"prompt": [5], "stop_token_ids": [161]}):
            response = await bench.complete(**{"model": "tiny", **how})
            assert response.status_code == 400
            assert "token id 161 is not in 0 … 159" in response.json()["error"]["message"]


async def test_without_a_tokenizer_a_warning_says_so(adapter: Path, tmp_path: Path) -> None:
    async with running(adapter, tmp_path / "a", eos=None) as bench:
        told = await bench.load(load_inplace=True)
        assert any("no tokenizer.json" in warning for warning in told["warnings"])
        choice = await bench.choice(TOKENS, max_tokens=16, ignore_eos=True)
        assert max(choice["token_ids"]) >= VOCAB
        assert choice["text"] == "".join(str(t) for t in choice["token_ids"] if t < VOCAB)


async def test_a_broken_tokenizer_refuses_the_load_and_the_name_keeps_what_it_had(
    adapter: Path, tmp_path: Path
) -> None:
    async with running(adapter, tmp_path / "a", eos=GROWN - 1) as bench:
        (bench.folder / "tokenizer.json").write_text("{}")
        body = {"lora_name": "grown", "lora_path": str(bench.folder), "load_inplace": True}
        response = await bench.client.post("/v1/load_lora_adapter", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "adapter_refused"
        assert (await bench.choice(PROMPT))["prompt_token_ids"] == TOKENS


async def test_requests_go_on_while_tokenizers_change(adapter: Path, tmp_path: Path) -> None:
    """Each prompt is read by the tokenizer that wrote it, or sent back."""
    async with running(adapter, tmp_path / "a", eos=GROWN - 1) as bench:

        async def ask() -> list[httpx.Response]:
            return [await bench.complete(PROMPT, max_tokens=2) for _ in range(20)]

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        for i in range(6):
            (bench.folder / "chat_template.jinja").write_text(f"<t160> {i}")
            await bench.load(load_inplace=True)
        answers = [answer for task in asking for answer in await task]
        assert 200 in {answer.status_code for answer in answers} <= {200, 409}
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["prompt_token_ids"] == TOKENS
