"""Who may call what with which key, and how much."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loramux.config import ServerOptions
from loramux.errors import ConfigError
from loramux.server.answer import Answer
from loramux.server.app import create_app
from loramux.server.keys import Key, Keyring
from loramux.server.limits import Account, Limits
from loramux.server.metrics import Metrics
from loramux.testing import FakeEngine
from loramux.types import GenerationRequest, SamplingParams, SourceRules
from tests.fake_clock import FakeClock
from tests.server.conftest import serving
from tests.server.test_disconnect import abandon, wait_until
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio

ADAPTERS = ("tenant-a-one", "tenant-a-two", "tenant-b-one")
ASK = {"model": "base", "prompt": "abc"}
ENDLESS = {"model": "base", "prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "abc"}]}

ADMIN_CALLS = [
    ("POST", "/v1/adapters", {"name": "new", "source": "/adapters/new"}),
    ("PATCH", "/v1/adapters/tenant-a-one", {"pinned": True}),
    ("DELETE", "/v1/adapters/tenant-a-one", None),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/adapters/new"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "tenant-a-one"}),
]
EMBED = {"model": "base", "input": "abc"}
INFERENCE_CALLS = [
    ("POST", "/v1/completions", ASK),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/embeddings", EMBED),
]
TOKEN_CALLS = [
    ("POST", "/tokenize", {"prompt": "abc"}),
    ("POST", "/detokenize", {"tokens": [97]}),
]
LISTS = [
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tenant-a-one", None),
    ("GET", "/v1/adapters", None),
    ("GET", "/v1/adapters/tenant-a-one", None),
]
OPEN_CALLS = ["/health", "/ready", "/version", "/metrics", "/openapi.json"]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(adapters=dict.fromkeys(ADAPTERS, "/adapters/some"))


def secret_of(name: str) -> str:
    return f"sk-R7{name}Q9"


def key(name: str, **fields: Any) -> Key:
    """A key whose secret is ``secret_of(name)``."""
    digest = hashlib.sha256(secret_of(name).encode()).digest()
    return Key(name=name, digest=digest, **fields)


def limited(name: str, **limits: float) -> Key:
    return key(name, limits=Limits(**limits))


OPERATOR = key("operator", admin=True, infer=False)
TENANT = key("tenant-a", adapters=("tenant-a-*",))
FREE = key("free")
KEYLESS = Keyring(open_inference=True)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret_of(name)}"}


@asynccontextmanager
async def serve(
    engine: FakeEngine,
    *keys: Key,
    clock: Callable[[], float] | None = None,
    host: str = "10.0.0.5",
    open_inference: bool = False,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client at another machine by default, which sends no key by itself."""
    keyring = Keyring(keys, open_inference=open_inference, clock=clock or FakeClock())
    app = create_app(engine, keyring=keyring)
    transport = httpx.ASGITransport(app, client=(host, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def call(
    client: httpx.AsyncClient, request: tuple[str, str, Any], name: str | None = None
) -> httpx.Response:
    method, path, body = request
    return await client.request(method, path, json=body, headers=bearer(name) if name else None)


def ids(request: tuple[str, str, Any]) -> str:
    return f"{request[0]} {request[1]}"


# Who may call what


@pytest.mark.parametrize(
    "request_", [*INFERENCE_CALLS, *TOKEN_CALLS, *LISTS, *ADMIN_CALLS], ids=ids
)
@pytest.mark.parametrize(
    ("header", "words"),
    [
        (None, "needs a key"),
        ("", "needs a key"),
        ("Bearer", "does not know the key"),
        ("Bearer sk-R7strangerQ9", "does not know the key"),
        (f"Bearer {secret_of('free')}x", "does not know the key"),
        (f"Bearer {secret_of('free')} x", "does not know the key"),
        ("Bearer é", "does not know the key"),
        (f"Basic {secret_of('free')}", "needs a key"),
        (secret_of("free"), "needs a key"),
    ],
)
async def test_without_a_known_key_the_answer_is_401(
    engine: FakeEngine, request_: tuple[str, str, Any], header: str | None, words: str
) -> None:
    before = await engine.adapters()
    method, path, body = request_
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    async with serve(engine, FREE, OPERATOR) as client:
        response = await client.request(method, path, json=body, headers=headers)
    error = error_of(response, 401)
    assert words in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "R7" not in response.text
    assert (engine.requests, await engine.adapters()) == ([], before)


@pytest.mark.parametrize("request_", [*INFERENCE_CALLS, *TOKEN_CALLS, *LISTS], ids=ids)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_an_inference_key_infers_and_lists(
    engine: FakeEngine, request_: tuple[str, str, Any], scheme: str
) -> None:
    method, path, body = request_
    headers = {"Authorization": f"{scheme} {secret_of('free')}"}
    async with serve(engine, FREE) as client:
        response = await client.request(method, path, json=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("request_", ADMIN_CALLS, ids=ids)
@pytest.mark.parametrize("host", ["10.0.0.5", "127.0.0.1"])
async def test_an_inference_key_may_not_administer(
    engine: FakeEngine, request_: tuple[str, str, Any], host: str
) -> None:
    before = await engine.adapters()
    async with serve(engine, FREE, OPERATOR, host=host) as client:
        error = error_of(await call(client, request_, "free"), 403)
    assert "'free'" in error["message"]
    assert "use an admin key" in error["message"]
    assert error["type"] == "permission_error"
    assert await engine.adapters() == before


@pytest.mark.parametrize("request_", ADMIN_CALLS, ids=ids)
async def test_with_keys_but_no_admin_key_nobody_may_administer(
    engine: FakeEngine, request_: tuple[str, str, Any]
) -> None:
    before = await engine.adapters()
    async with serve(engine, FREE, host="127.0.0.1") as client:
        error_of(await call(client, request_), 401)
        error = error_of(await call(client, request_, "free"), 403)
    assert "no admin key" in error["message"]
    assert await engine.adapters() == before


@pytest.mark.parametrize("request_", ADMIN_CALLS, ids=ids)
@pytest.mark.parametrize("headers", [{}, {"X-Forwarded-For": "10.0.0.6"}])
async def test_an_admin_key_administers_from_anywhere(
    engine: FakeEngine, request_: tuple[str, str, Any], headers: dict[str, str]
) -> None:
    method, path, body = request_
    before = await engine.adapters()
    async with serve(engine, FREE, OPERATOR) as client:
        headers = headers | bearer("operator")
        response = await client.request(method, path, json=body, headers=headers)
    assert response.status_code in (200, 201)
    assert await engine.adapters() != before


@pytest.mark.parametrize("request_", [*INFERENCE_CALLS, *TOKEN_CALLS], ids=ids)
async def test_an_admin_key_may_not_infer_unless_it_says_so(
    engine: FakeEngine, request_: tuple[str, str, Any]
) -> None:
    async with serve(engine, OPERATOR, key("both", admin=True)) as client:
        error = error_of(await call(client, request_, "operator"), 403)
        assert "'operator'" in error["message"]
        assert "infer = true" in error["message"]
        assert engine.requests == []
        assert (await call(client, request_, "both")).status_code == 200


async def test_rules_for_sources_bind_admin_keys_too(engine: FakeEngine) -> None:
    keyring = Keyring([OPERATOR], open_inference=False)
    app = create_app(engine, options=ServerOptions(adapter_root="/adapters"), keyring=keyring)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        await call(client, ADMIN_CALLS[0], "operator")
    assert engine.rules == [SourceRules(root="/adapters")]


@pytest.mark.parametrize("path", OPEN_CALLS)
async def test_what_tells_of_the_server_itself_needs_no_key(engine: FakeEngine, path: str) -> None:
    async with serve(engine, FREE, OPERATOR) as client:
        assert (await client.get(path)).status_code == 200


async def test_every_other_route_is_guarded(engine: FakeEngine) -> None:
    """A route that is added and forgets to ask for a key is found here."""
    app = create_app(engine, keyring=Keyring([FREE, OPERATOR], open_inference=False))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1234))
    unguarded = set()
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path, methods in app.openapi()["paths"].items():
            for method in methods:
                response = await client.request(method, path.replace("{name}", "tenant-a-one"))
                if response.status_code != 401:
                    unguarded.add(path)
    assert unguarded <= set(OPEN_CALLS)


@pytest.mark.parametrize("request_", [*INFERENCE_CALLS, *TOKEN_CALLS, *LISTS], ids=ids)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer EMPTY"}])
async def test_an_admin_key_alone_leaves_requests_open(
    engine: FakeEngine, request_: tuple[str, str, Any], headers: dict[str, str]
) -> None:
    method, path, body = request_
    async with serve(engine, OPERATOR, open_inference=True) as client:
        response = await client.request(method, path, json=body, headers=headers)
        assert response.status_code == 200
        error_of(await client.request("DELETE", "/v1/adapters/tenant-a-one", headers=headers), 401)


# Without keys all is as it was


@pytest.mark.parametrize("request_", [*INFERENCE_CALLS, *TOKEN_CALLS, *LISTS], ids=ids)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer EMPTY"}])
async def test_without_keys_everyone_may_infer_and_list(
    engine: FakeEngine, request_: tuple[str, str, Any], headers: dict[str, str]
) -> None:
    method, path, body = request_
    transport = httpx.ASGITransport(create_app(engine), client=("10.0.0.5", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.request(method, path, json=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("request_", ADMIN_CALLS, ids=ids)
async def test_without_keys_only_this_machine_may_administer(
    engine: FakeEngine, request_: tuple[str, str, Any]
) -> None:
    for host, statuses in (("10.0.0.5", {403}), ("127.0.0.1", {200, 201})):
        transport = httpx.ASGITransport(create_app(engine), client=(host, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await call(client, request_)).status_code in statuses


def test_an_app_with_a_keys_file_in_its_options_reads_it(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="'/no/keys'"):
        create_app(engine, options=ServerOptions(keys="/no/keys"))


# Names of others


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_of_others_is_as_unknown_as_one_that_is_not_there(
    engine: FakeEngine, path: str, stream: bool
) -> None:
    body = (ASK if path == "/v1/completions" else CHAT) | {"stream": stream}
    texts = []
    async with serve(engine, TENANT) as client:
        for model in ("tenant-b-one", "tenant-b-nil", "tenant-a-nil", "base"):
            response = await call(client, ("POST", path, body | {"model": model}), "tenant-a")
            error = error_of(response, 404)
            assert error["code"] == "model_not_found"
            texts.append(response.text.replace(model, "MODEL"))
        assert len(set(texts)) == 1
        assert engine.requests == []
        request = ("POST", path, body | {"model": "tenant-a-one"})
        assert (await call(client, request, "tenant-a")).status_code == 200


@pytest.mark.parametrize("request_", TOKEN_CALLS, ids=ids)
async def test_tokenizers_of_others_are_hidden_like_their_adapters(
    engine: FakeEngine, request_: tuple[str, str, Any]
) -> None:
    method, path, body = request_
    async with serve(engine, TENANT) as client:
        statuses = [
            (await call(client, (method, path, body | model), "tenant-a")).status_code
            for model in ({"model": "tenant-a-one"}, {"model": "tenant-b-one"}, {})
        ]
    assert statuses == [200, 404, 404]


@pytest.mark.parametrize("request_", TOKEN_CALLS, ids=ids)
async def test_calls_of_a_tokenizer_count_as_requests(
    engine: FakeEngine, clock: FakeClock, request_: tuple[str, str, Any]
) -> None:
    async with serve(engine, limited("slow", requests_per_second=1), clock=clock) as client:
        assert (await call(client, request_, "slow")).status_code == 200
        limit_error(await call(client, request_, "slow"), "slow", "requests_per_second of 1")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/adapters"])
async def test_one_of_others_is_as_unknown_as_one_that_is_not_there(
    engine: FakeEngine, path: str
) -> None:
    async with serve(engine, TENANT) as client:
        hidden, missing = [
            await call(client, ("GET", f"{path}/{name}", None), "tenant-a")
            for name in ("tenant-b-one", "tenant-b-nil")
        ]
        shown = await call(client, ("GET", f"{path}/tenant-a-one", None), "tenant-a")
    error_of(hidden, 404)
    assert hidden.text.replace("tenant-b-one", "tenant-b-nil") == missing.text
    assert shown.status_code == 200


@pytest.mark.parametrize(
    ("caller", "models"),
    [
        ("tenant-a", ["tenant-a-one", "tenant-a-two"]),
        ("base-only", ["base"]),
        ("free", ["base", *ADAPTERS]),
        ("operator", ["base", *ADAPTERS]),
        ("both", ["base", *ADAPTERS]),
    ],
)
async def test_lists_hold_what_the_key_may_use(
    engine: FakeEngine, caller: str, models: list[str]
) -> None:
    keys = [
        TENANT,
        FREE,
        OPERATOR,
        key("base-only", adapters=("base",)),
        key("both", admin=True, adapters=("base",)),
    ]
    async with serve(engine, *keys) as client:
        listed = (await call(client, ("GET", "/v1/models", None), caller)).json()["data"]
        adapters = (await call(client, ("GET", "/v1/adapters", None), caller)).json()["data"]
    assert [model["id"] for model in listed] == models
    assert [adapter["name"] for adapter in adapters] == [m for m in models if m != "base"]


async def test_the_served_name_of_the_base_is_what_a_key_names() -> None:
    keyring = Keyring([key("k", adapters=("assistant",))], open_inference=False)
    app = create_app(FakeEngine("/disk/model"), base_name="assistant", keyring=keyring)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        request = ("POST", "/v1/completions", ASK | {"model": "assistant"})
        assert (await call(client, request, "k")).status_code == 200


async def test_an_adapter_loaded_later_belongs_to_whom_its_name_fits(engine: FakeEngine) -> None:
    async with serve(engine, TENANT, OPERATOR) as client:
        body = {"name": "tenant-a-new", "source": "/adapters/new"}
        request = ("POST", "/v1/completions", ASK | {"model": "tenant-a-new"})
        error_of(await call(client, request, "tenant-a"), 404)
        await call(client, ("POST", "/v1/adapters", body), "operator")
        assert (await call(client, request, "tenant-a")).status_code == 200


# Limits


def limit_error(response: httpx.Response, key: str, limit: str) -> dict[str, Any]:
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert f"'{key}'" in error["message"]
    assert limit in error["message"]
    return error


@pytest.mark.parametrize("request_", INFERENCE_CALLS, ids=ids)
async def test_requests_a_second_are_limited_by_key(
    engine: FakeEngine, clock: FakeClock, request_: tuple[str, str, Any]
) -> None:
    keys = [limited("slow", requests_per_second=0.25), FREE]
    async with serve(engine, *keys, clock=clock) as client:
        assert (await call(client, request_, "slow")).status_code == 200
        response = await call(client, request_, "slow")
        limit_error(response, "slow", "requests_per_second of 0.25")
        assert response.headers["retry-after"] == "4"
        assert len(engine.requests) == 1
        assert (await call(client, request_, "free")).status_code == 200
        clock.now += 3.9
        limit_error(await call(client, request_, "slow"), "slow", "again in 1 s")
        clock.now += 0.1
        assert (await call(client, request_, "slow")).status_code == 200


async def test_lists_are_not_limited(engine: FakeEngine) -> None:
    async with serve(engine, limited("slow", requests_per_second=0.25)) as client:
        for _ in range(3):
            assert (await call(client, LISTS[0], "slow")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_prompt_and_answer_are_charged(
    engine: FakeEngine, clock: FakeClock, stream: bool
) -> None:
    """Two prompts of 3 and 5 tokens, each with two answers of 3 and 5 tokens: 24 of 60."""
    body = ASK | {"prompt": ["abc", "abcde"], "n": 2, "stream": stream}
    async with serve(engine, limited("small", tokens_per_minute=60), clock=clock) as client:
        assert (await call(client, ("POST", "/v1/completions", body), "small")).status_code == 200
        too_long = ("POST", "/v1/completions", ASK | {"prompt": "a" * 40, "max_tokens": 1})
        response = await call(client, too_long, "small")
        limit_error(response, "small", "tokens_per_minute of 60")
        assert response.headers["retry-after"] == "4"
        assert len(engine.requests) == 2
        clock.now += 4
        assert (await call(client, too_long, "small")).status_code == 200


async def test_what_the_engine_refuses_costs_no_tokens(
    engine: FakeEngine, clock: FakeClock
) -> None:
    engine.max_model_len = 20
    async with serve(engine, limited("small", tokens_per_minute=30), clock=clock) as client:
        for prompt in (["ok", "a" * 25], "a" * 29):
            request = ("POST", "/v1/completions", ASK | {"prompt": prompt})
            error_of(await call(client, request, "small"), 400)
        request = ("POST", "/v1/completions", ASK | {"prompt": "a" * 19, "max_tokens": 1})
        assert (await call(client, request, "small")).status_code == 200


async def test_a_broken_answer_costs_what_was_made_of_it(
    engine: FakeEngine, clock: FakeClock
) -> None:
    engine.error_after = 2
    async with serve(engine, limited("small", tokens_per_minute=60), clock=clock) as client:
        error_of(await call(client, ("POST", "/v1/completions", ENDLESS), "small"), 500)
        assert await used(client, "loramux_key_tokens_total") == {"small": 5}


async def test_a_client_that_does_not_read_pays_all_the_same(engine: FakeEngine) -> None:
    account = Account("lazy", Limits())
    answer = await Answer.submit(
        engine,
        [
            GenerationRequest(
                prompt_token_ids=[97, 98, 99],
                params=SamplingParams(max_tokens=50, ignore_eos=True),
            )
        ],
        timer=Metrics(engine, max_adapters=0, keyring=KEYLESS).timer("/v1/completions"),
        seconds=60,
        interval=0,
        account=account,
    )
    with answer:
        parts = answer.parts()
        await anext(parts)
        async with asyncio.timeout(5):
            while engine.running:
                await asyncio.sleep(0)
        assert account.num_tokens == 53


async def test_requests_in_flight_are_limited_by_key(engine: FakeEngine) -> None:
    engine.tick_seconds = 0.02
    keys = [limited("narrow", max_in_flight=2), FREE]
    request = ("POST", "/v1/completions", ASK)
    async with serve(engine, *keys) as client:
        running = [asyncio.create_task(call(client, request, "narrow")) for _ in range(2)]
        while len(engine.running) < 2:
            await asyncio.sleep(0.001)
        assert await used(client, "loramux_key_requests_in_flight") == {"narrow": 2, "free": 0}
        response = await call(client, request, "narrow")
        limit_error(response, "narrow", "max_in_flight of 2")
        assert response.headers["retry-after"] == "1"
        assert (await call(client, request, "free")).status_code == 200
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await call(client, request, "narrow")).status_code == 200
        assert await used(client, "loramux_key_requests_in_flight") == {"narrow": 0, "free": 0}


async def test_failed_requests_give_their_place_back(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(engine, limited("narrow", max_in_flight=1, tokens_per_minute=9)) as client:

        async def statuses(body: Any) -> int:
            return (await call(client, ("POST", "/v1/completions", body), "narrow")).status_code

        assert await statuses({"prompt": "abc"}) == 400
        assert await statuses(ASK | {"prompt": ""}) == 400
        assert await statuses(ASK | {"model": "nobody"}) == 404
        engine.error_after = 0
        assert await statuses(ASK) == 500
        assert await statuses(ASK | {"stream": True}) == 200
        assert await statuses(ASK | {"prompt": "a" * 8}) == 429
        engine.failure = "the device is lost"
        assert await statuses(ASK) == 503
        with monkeypatch.context() as patch:
            patch.setattr(engine, "text_of", None)
            assert await statuses(ASK) == 500
        assert await used(client, "loramux_key_requests_in_flight") == {"narrow": 0}
        engine.failure = engine.error_after = None
        assert await statuses(ASK) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_gives_its_place_back(engine: FakeEngine, stream: bool) -> None:
    engine.tick_seconds = 0.01
    keyring = Keyring([limited("narrow", max_in_flight=1)], open_inference=False)
    [account] = keyring.accounts
    headers = bearer("narrow")
    with serving(create_app(engine, keyring=keyring)) as url:
        path = f"{url}/v1/completions"
        if stream:
            with httpx.stream("POST", path, json=ENDLESS | {"stream": True}, headers=headers) as r:
                lines = r.iter_lines()
                assert next(lines).startswith("data: ")
                assert account.in_flight == 1
                assert httpx.post(path, json=ASK, headers=headers).status_code == 429
        else:
            abandon(path, ENDLESS, lambda: account.in_flight == 1, headers)
        wait_until(lambda: account.in_flight == 0)
        assert httpx.post(path, json=ASK, headers=headers).status_code == 200


def test_a_stream_holds_its_place_to_its_end(engine: FakeEngine) -> None:
    engine.tick_seconds = 0.01
    keyring = Keyring([limited("narrow", max_in_flight=1)], open_inference=False)
    [account] = keyring.accounts
    with serving(create_app(engine, keyring=keyring)) as url:
        body = ASK | {"stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=bearer("narrow")
        ) as response:
            lines = response.iter_lines()
            next(lines)
            assert account.in_flight == 1
            assert "data: [DONE]" in list(lines)
        wait_until(lambda: account.in_flight == 0)


# What is told of keys


async def used(client: httpx.AsyncClient, metric: str) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    return {s.labels["key"]: s.value for s in samples if s.name == metric}


async def test_metrics_count_by_the_names_of_keys(engine: FakeEngine, clock: FakeClock) -> None:
    keys = [limited("slow", requests_per_second=1), FREE, OPERATOR]
    async with serve(engine, *keys, clock=clock) as client:
        for name in ("slow", "slow", "free"):
            await call(client, ("POST", "/v1/completions", ASK), name)
        text = (await client.get("/metrics")).text
        requests = await used(client, "loramux_key_requests_total")
        tokens = await used(client, "loramux_key_tokens_total")
    assert requests == {"slow": 2, "free": 1, "operator": 0}
    assert tokens == {"slow": 6, "free": 6, "operator": 0}
    line = 'loramux_key_refused_requests_total{key="slow",limit="requests_per_second"} 1.0'
    assert line in text.splitlines()


async def test_without_keys_there_are_no_metrics_of_keys(client: httpx.AsyncClient) -> None:
    assert "loramux_key_" not in (await client.get("/metrics")).text


async def test_the_log_tells_whose_key_changed_the_server(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loramux")
    async with serve(engine, OPERATOR) as client:
        await call(client, ADMIN_CALLS[2], "operator")
    assert "DELETE /v1/adapters/{name:path} by the key operator" in caplog.text


async def test_no_key_is_in_any_log_or_answer(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every call with every key and a wrong one, and a fault of our own, with all logs on."""
    caplog.set_level(logging.DEBUG)
    keys = [OPERATOR, TENANT, limited("slow", requests_per_second=1, tokens_per_minute=1)]
    answers = []
    async with serve(engine, *keys) as client:
        for name in ("operator", "tenant-a", "slow", "stranger"):
            for request in [*INFERENCE_CALLS, *TOKEN_CALLS, *LISTS, *ADMIN_CALLS]:
                answers.append(await call(client, request, name))
            answers.append(await client.get("/metrics", headers=bearer(name)))
        monkeypatch.setattr(engine, "text_of", None)
        request = ("POST", "/v1/completions", ASK | {"model": "tenant-a-two"})
        answers.append(await call(client, request, "tenant-a"))
    assert {answer.status_code for answer in answers} >= {200, 201, 401, 403, 404, 429, 500}
    told = caplog.text + "".join(f"{answer.text} {answer.headers}" for answer in answers)
    assert "failed" in caplog.text
    for name in ("operator", "tenant-a", "slow", "stranger"):
        assert secret_of(name) not in told
        assert hashlib.sha256(secret_of(name).encode()).hexdigest() not in told
