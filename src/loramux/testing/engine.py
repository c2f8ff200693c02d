"""An engine without a model: it answers with the prompt itself."""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from loramux.errors import (
    AdapterExists,
    AdapterRefused,
    AdapterReplaced,
    AdapterSourceNotFound,
    EngineStopped,
    InvalidRequest,
    UnknownAdapter,
    UnknownModel,
)
from loramux.stats import EngineStats, Histogram
from loramux.testing.codec import FakeCodec
from loramux.types import (
    AdapterId,
    AdapterInfo,
    Delta,
    EmbeddingRequest,
    EngineRequest,
    GenerationRequest,
    PoolingParams,
    RequestId,
    SourceRules,
    TokenLogprobs,
    Waited,
)

NUM_SLOTS = 8


class FakeEngine:
    """An ``Engine`` that repeats the prompt, one token a tick, and stops when it is through.

    The base model answers with the prompt as it is, an adapter with its upper case. With
    ``ignore_eos`` the answer starts over and over until ``max_tokens``. Sources: ``missing`` does
    not exist, ``bad`` is refused for two reasons, all others load.

    ``tick_seconds`` is the time of one token; ``error_after`` lets every request fail after that
    many tokens; ``failure`` may be set at any time and takes the engine down. ``requests`` holds
    all that was submitted, ``aborted`` the ids of requests that were aborted while they ran,
    ``rules`` those of each load. ``running_adapters`` and ``waiting_adapters`` are what the
    statistics say of them. An adapter in ``codecs`` has a codec of its own. Guides
    change no answer. A prompt finds cached what the one before it, of the same model and salt,
    begins with. ``waited`` is what every sequence says of its wait. An embedding takes one tick;
    ``echoed_embedding`` says which one it is.
    """

    def __init__(
        self,
        base_name: str = "base",
        adapters: Mapping[str, str] | None = None,
        *,
        max_model_len: int = 4096,
        tick_seconds: float = 0.0,
        error_after: int | None = None,
        codec: FakeCodec | None = None,
    ) -> None:
        self.base_name = base_name
        self.max_model_len = max_model_len
        self.text = codec or FakeCodec()
        self.codecs: dict[str, FakeCodec] = {}
        self.tick_seconds = tick_seconds
        self.error_after = error_after
        self.failure: str | None = None
        self.requests: list[EngineRequest] = []
        self.aborted: list[RequestId] = []
        self.rules: list[SourceRules | None] = []
        self.waited = Waited(0.0, 0.0)
        self.running: set[RequestId] = set()
        self.running_adapters: tuple[str, ...] = ()
        self.waiting_adapters: tuple[str, ...] = ()
        self.counts = _Counts()
        self._adapters: dict[str, AdapterInfo] = {}
        self._last_prompts: dict[tuple[str | None, str | None], tuple[int, ...]] = {}
        for name, source in (adapters or {}).items():
            self._adapters[name] = _adapter_info(name, source, pinned=False)

    async def start(self) -> None:
        """Nothing to do; ``AsyncEngine`` has it."""

    async def stop(self) -> None:
        """Take no more requests."""
        self.failure = self.failure or "the engine has been stopped"

    async def text_of(self, model: str | None) -> FakeCodec:
        if model is None or model == self.base_name:
            return self.text
        if model not in self._adapters:
            raise UnknownModel(model)
        return self.codecs.get(model, self.text)

    async def submit(self, request: EngineRequest) -> FakeStream | FakeEmbeddingStream:
        if self.failure is not None:
            raise EngineStopped(self.failure)
        codec = await self.text_of(request.model)
        if request.codec not in (None, codec.key):
            raise AdapterReplaced(str(request.model))
        if isinstance(request, GenerationRequest) and request.params.guide is not None:
            await asyncio.to_thread(codec.compile, request.params.guide)
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if len(prompt) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens, the context holds {self.max_model_len}",
                "prompt",
            )
        request_id = request.request_id or RequestId(f"fake-{len(self.requests)}")
        self.requests.append(request)
        self.running.add(request_id)
        self.counts.prompt_tokens += len(prompt)
        last = self._last_prompts.get((request.model, request.cache_salt), ())
        self._last_prompts[request.model, request.cache_salt] = tuple(prompt)
        cached = min(_common_length(last, prompt), len(prompt) - 1)
        self.counts.cached_tokens += cached
        if isinstance(request, EmbeddingRequest):
            return FakeEmbeddingStream(self, replace(request, request_id=request_id), cached)
        return FakeStream(self, replace(request, request_id=request_id), cached)

    async def load_adapter(
        self,
        name: str,
        source: str,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        rules: SourceRules | None = None,
    ) -> AdapterInfo:
        if name == self.base_name:
            raise AdapterExists(name, "the base model has this name")
        if name in self._adapters and not load_inplace:
            raise AdapterExists(name, "the name is taken: unload it first or set load_inplace")
        self.rules.append(rules)
        if source == "missing":
            raise AdapterSourceNotFound(name, source, "no such directory")
        if source == "bad":
            raise AdapterRefused(name, ["layer 7 does not exist", "bias='all' is not supported"])
        info = self._adapters[name] = _adapter_info(name, source, pinned=pinned)
        return info

    async def unload_adapter(self, name: str) -> None:
        if self._adapters.pop(name, None) is None:
            raise UnknownAdapter(name)

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        if name not in self._adapters:
            raise UnknownAdapter(name)
        others = sum(info.pinned for info in self._adapters.values() if info.name != name)
        if pinned and others + 1 >= NUM_SLOTS:
            raise AdapterRefused(name, ["pinning it would leave no slot for others"])
        info = self._adapters[name] = replace(self._adapters[name], pinned=pinned)
        return info

    async def adapters(self) -> list[AdapterInfo]:
        return list(self._adapters.values())

    async def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            kv_blocks_used=len(self.running),
            kv_blocks_total=64,
            slots_used=len(self._adapters),
            slots_total=NUM_SLOTS,
            num_steps=self.counts.output_tokens,
            prompt_tokens=self.counts.prompt_tokens,
            prefix_queries=self.counts.prompt_tokens,
            prefix_hits=self.counts.cached_tokens,
            output_tokens=self.counts.output_tokens,
            preemptions=0,
            slot_drains=0,
            host_bytes=0,
            host_adapters=0,
            host_evictions=0,
            slot_loads=len(self._adapters),
            slot_evictions=0,
            requests_finished=self.counts.finished,
            requests_aborted=len(self.aborted),
            adapter_bytes=sum(info.num_bytes for info in self._adapters.values()),
            last_step_adapters=0,
            max_step_adapters=0,
            step_seconds=Histogram((1.0,), (self.counts.output_tokens, 0), 0.0),
            step_sequences=Histogram((1.0,), (self.counts.output_tokens, 0), 0.0),
            step_adapters=Histogram((1.0,), (self.counts.output_tokens, 0), 0.0),
            queue_seconds=Histogram((1.0,), (len(self.requests), 0), 0.0),
            found_in_slot=0,
            found_in_host=0,
            found_in_source=0,
            host_loads=len(self._adapters),
            read_seconds=Histogram((1.0,), (len(self._adapters), 0), 0.0),
            slot_load_seconds=Histogram((1.0,), (0, 0), 0.0),
            slot_wait_seconds=Histogram((1.0,), (0, 0), 0.0),
            running_adapters=self.running_adapters,
            waiting_adapters=self.waiting_adapters,
        )


class FakeStream:
    """The ``Stream`` of a FakeEngine: one delta a tick, the completions in turn."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, cached_tokens: int) -> None:
        assert request.request_id is not None
        self.request_id = request.request_id
        self._engine = engine
        self._params = request.params
        self._cached_tokens = cached_tokens
        self._prompt = tuple(request.prompt_token_ids)
        self._answer = _answer(self._prompt, upper=request.model not in (None, engine.base_name))
        self._limit = self._params.max_tokens or engine.max_model_len - len(self._prompt)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        length = self._limit
        if not self._params.ignore_eos:
            length = min(length, len(self._answer))
        for position in range(length):
            for index in range(self._params.n):
                await asyncio.sleep(self._engine.tick_seconds)
                if self.request_id not in self._engine.running:
                    return
                if self._engine.failure is not None:
                    raise EngineStopped(self._engine.failure)
                yield self._delta(position, index, last=position == length - 1)
                if position == self._engine.error_after:
                    self._engine.running.discard(self.request_id)
                    return
        self._engine.running.discard(self.request_id)
        self._engine.counts.finished += 1

    def abort(self) -> None:
        if self.request_id in self._engine.running:
            self._engine.running.remove(self.request_id)
            self._engine.aborted.append(self.request_id)

    def _delta(self, position: int, index: int, *, last: bool) -> Delta:
        if position == self._engine.error_after:
            return Delta(
                self.request_id, index, "", (), finish_reason="error", error="the logits are NaN"
            )
        self._engine.counts.output_tokens += 1
        token = self._answer[position % len(self._answer)]
        at_limit = position + 1 == self._limit
        return Delta(
            self.request_id,
            index,
            chr(token),
            (token,),
            logprobs=_logprobs([token], self._params.logprobs),
            finish_reason=("length" if at_limit else "stop") if last else None,
            prompt_logprobs=self._prompt_logprobs() if position == index == 0 else None,
            cached_tokens=self._cached_tokens if position == 0 else 0,
            waited=self._engine.waited if position == 0 else None,
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        if self._params.prompt_logprobs is None:
            return None
        return (None, *_logprobs(self._prompt[1:], self._params.prompt_logprobs))


class FakeEmbeddingStream:
    """The ``Stream`` of an embedding."""

    def __init__(self, engine: FakeEngine, request: EmbeddingRequest, cached_tokens: int) -> None:
        assert request.request_id is not None
        self.request_id = request.request_id
        self._engine = engine
        self._request = request
        self._cached_tokens = cached_tokens

    async def __aiter__(self) -> AsyncIterator[Delta]:
        await asyncio.sleep(self._engine.tick_seconds)
        if self.request_id not in self._engine.running:
            return
        if self._engine.failure is not None:
            raise EngineStopped(self._engine.failure)
        self._engine.running.remove(self.request_id)
        self._engine.counts.finished += 1
        if self._engine.error_after is not None:
            yield Delta(
                self.request_id, 0, "", (), finish_reason="error", error="the states are NaN"
            )
            return
        upper = self._request.model not in (None, self._engine.base_name)
        numbers = echoed_embedding(
            self._request.prompt_token_ids, self._request.params, upper=upper
        )
        yield Delta(
            self.request_id,
            0,
            "",
            (),
            finish_reason="stop",
            cached_tokens=self._cached_tokens,
            embedding=struct.pack(f"<{len(numbers)}f", *numbers),
        )

    def abort(self) -> None:
        if self.request_id in self._engine.running:
            self._engine.running.remove(self.request_id)
            self._engine.aborted.append(self.request_id)


def echoed_embedding(
    prompt: Sequence[int], params: PoolingParams, *, upper: bool = False
) -> list[float]:
    """What a FakeEngine makes of a prompt: its length, and its last token or their mean.

    ``upper``: as an adapter does.
    """
    tokens = _answer(prompt, upper=upper)
    state = tokens[-1] if params.pooling == "last" else sum(tokens) / len(tokens)
    numbers = [float(len(prompt)), float(state)]
    length = math.hypot(*numbers) if params.normalize else 1.0
    return [number / length for number in numbers]


@dataclass
class _Counts:
    prompt_tokens: int = field(default=0)
    cached_tokens: int = field(default=0)
    output_tokens: int = field(default=0)
    finished: int = field(default=0)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _answer(prompt: Sequence[int], *, upper: bool) -> list[int]:
    text = "".join(chr(token) for token in prompt)
    return [ord(character) for character in (text.upper() if upper else text)]


def _logprobs(tokens: Sequence[int], top: int | None) -> tuple[TokenLogprobs, ...]:
    """The token itself at -0.5, then the code points that follow it at -1.5, -2.5, …"""
    if top is None:
        return ()
    return tuple(
        TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(top)))
        for token in tokens
    )


def _adapter_info(name: str, source: str, *, pinned: bool) -> AdapterInfo:
    digest = hashlib.sha256(source.encode()).hexdigest()
    return AdapterInfo(
        name=name,
        adapter_id=AdapterId(digest[:16]),
        source=source,
        num_bytes=1024,
        max_rank=8,
        pinned=pinned,
        slot=None,
        tier="host",
        in_flight=0,
    )
