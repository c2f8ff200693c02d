"""A whole engine over a FakeWorker, small enough that everything runs out, and its true answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loramux.adapter_weights import AdapterWeights
from loramux.adapters.catalog import Catalog
from loramux.engine.adapters import IncomingAdapter
from loramux.engine.admission import Admission
from loramux.engine.admission import Limits as RequestLimits
from loramux.engine.core import EngineCore
from loramux.engine.languages import Language, Languages
from loramux.engine.origins import Origin
from loramux.scheduling.request import Request
from loramux.scheduling.steps import Limits
from loramux.testing import FakeCodec, FakeWorker, expected_tokens
from loramux.testing.worker import VOCAB_SIZE
from loramux.types import (
    AdapterInfo,
    Delta,
    EmbeddingRequest,
    EngineRequest,
    FinishReason,
    GenerationRequest,
    PoolingParams,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    Waited,
    numbers_of,
)


@dataclass
class Outcome:
    """What the deltas of one completion add up to."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprobs | None, ...]] = field(default_factory=list)
    """One entry for each time they were reported."""
    error: str | None = None
    cached_tokens: int = 0
    waits: list[Waited] = field(default_factory=list, compare=False)
    """One entry for each delta that told of it."""
    embedding: list[float] | None = None

    def push(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error
        self.cached_tokens += delta.cached_tokens
        if delta.waited is not None:
            self.waits.append(delta.waited)
        if delta.embedding is not None:
            self.embedding = numbers_of(delta.embedding)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs.append(delta.prompt_logprobs)


def expected_outcome(
    adapter_id: str | None,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    index: int = 0,
    eos: Collection[int] = (),
    max_model_len: int,
) -> Outcome:
    """The truth about one completion, found by trying each length in turn."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    room = max_model_len - len(prompt)
    longest = room if params.max_tokens is None else params.max_tokens
    seed = None if params.greedy else (params.seed or 0) + index
    tokens = expected_tokens(
        adapter_id, prompt, longest, seed=seed, min_tokens=params.min_tokens, ends=ends
    )
    for count in range(params.min_tokens + 1, longest + 1):
        done, last = tokens[:count], tokens[count - 1]
        text = "".join(map(chr, done))
        if last in ends:
            reason = last if params.ignore_eos or last not in eos else None
            return Outcome(done, text[:-1], "stop", reason)
        found = [stop for stop in params.stop if text.endswith(stop)]
        if found:
            stop = max(found, key=len)
            shown = text if params.include_stop_str_in_output else text.removesuffix(stop)
            return Outcome(done, shown, "stop", stop)
    return Outcome(tokens, "".join(map(chr, tokens)), "length")


class SmallEngine:
    """A core with its worker, driven by hand; every move ends with ``check``."""

    def __init__(
        self,
        *,
        num_slots: int = 2,
        num_blocks: int = 16,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_step_tokens: int = 8,
        arena_bytes: int = 100,
        max_model_len: int = 32,
        eos: Collection[int] = (),
        adapter_bytes: Mapping[str, int] | None = None,
        vocab_sizes: Mapping[str, int] | None = None,
        adapters: Sequence[str] = (),
        worker_type: type[FakeWorker] = FakeWorker,
        runs_ahead: bool = False,
        adapter_max_wait: float = math.inf,
        host_bytes: int | None = None,
        prefix_cache: bool = True,
        weights: AdapterWeights | str | None = None,
        max_load_bytes: int = 10**6,
        load_steps: int = 0,
    ) -> None:
        self.pending: list[Origin] = []
        """Adapters that the core has asked for."""
        self.now = 0.0
        self.max_model_len = max_model_len
        self.eos = eos
        self.worker = worker_type(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            arena_bytes=arena_bytes,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            adapter_bytes=adapter_bytes,
            vocab_sizes=vocab_sizes,
            runs_ahead=runs_ahead,
            load_steps=load_steps,
        )
        self.catalog = Catalog("base")
        self.languages = Languages(Language(FakeCodec(), frozenset(eos)), self.read_language)
        self.core = EngineCore(
            self.worker,
            self.languages,
            self.catalog,
            limits=Limits(max_num_seqs, max_step_tokens, block_size, max_load_bytes),
            num_blocks=num_blocks,
            num_slots=num_slots,
            arena_bytes=arena_bytes,
            host_bytes=10**6 if host_bytes is None else host_bytes,
            adapter_max_wait=adapter_max_wait,
            weights=AdapterWeights.parse(weights, "base") if isinstance(weights, str) else weights,
            clock=lambda: self.now,
        )
        limits = RequestLimits(max_model_len, VOCAB_SIZE, block_size if prefix_cache else None)
        self.admission = Admission(self.catalog, limits, self.languages)
        self.outcomes: dict[RequestId, list[Outcome]] = {}
        self.sequences: list[Request] = []
        """All that were ever submitted."""
        for name in adapters:
            self.load(name)

    def load(
        self, name: str, source: str | None = None, *, pinned: bool = False, replace: bool = False
    ) -> AdapterInfo:
        """Register ``source`` (by default the name itself, which is then also its id)."""
        source = source or name
        incoming = self._read(name, source)
        info = self.core.register(name, source, incoming, pinned=pinned, replace=replace)
        self._settle()
        return info

    def _read(self, name: str, source: str) -> IncomingAdapter:
        prepared = self.worker.read_adapter(name, Path(source))
        size = prepared.vocab_size
        language = None if size is None else self.read_language(name, Path(source), size)
        return IncomingAdapter(prepared, language)

    def read_language(self, name: str, directory: Path, vocab_size: int) -> Language:
        """One of the adapter's own, whose texts the token 7 ends as well."""
        return Language(FakeCodec(key=str(directory)), frozenset({*self.eos, 7}), str(directory))

    def unload(self, name: str) -> None:
        self.core.adapters.unregister(name)
        self._settle()

    def submit(
        self,
        model: str | None,
        prompt: Sequence[int],
        *,
        request_id: RequestId | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        **params: Any,
    ) -> RequestId:
        """Queue a request, greedy unless told otherwise."""
        sampling = SamplingParams(**{"temperature": 0.0, **params})
        request = GenerationRequest(
            prompt_token_ids=prompt,
            params=sampling,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            priority=priority,
        )
        return self.queue(request)

    def embed(
        self,
        model: str | None,
        prompt: Sequence[int],
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        **params: Any,
    ) -> RequestId:
        """Queue a request for a vector."""
        request = EmbeddingRequest(
            prompt_token_ids=prompt,
            params=PoolingParams(**params),
            model=model,
            cache_salt=cache_salt,
            priority=priority,
        )
        return self.queue(request)

    def queue(self, request: EngineRequest) -> RequestId:
        sequences = self.admission.admit(request)
        self.core.add(sequences)
        self._settle()
        self.sequences += sequences
        request_id = sequences[0].parent_id
        self.outcomes[request_id] = [Outcome() for _ in sequences]
        return request_id

    def abort(self, request_id: RequestId) -> None:
        self._take(self.core.abort(request_id))

    def step(self) -> list[Delta]:
        self.core.check_alive()
        deltas = self.core.step() if self.core.can_step else []
        self._take(deltas)
        return deltas

    def fetch(self, *, error: str | None = None) -> None:
        """End the fetch that has been asked for first."""
        origin = self.pending.pop(0)
        if error is not None:
            self._take(self.core.fetch_failed(origin, error))
        else:
            self._take(self.core.fetched(origin, self._read(origin.name, origin.source)))

    def run(self) -> None:
        """Step until all requests have ended, which they do even if each is computed thrice."""
        num_sequences = self.core.stats().num_running + self.core.stats().num_waiting
        for _ in range(3 * self.max_model_len * num_sequences + 2):
            if not self.core.has_work:
                return
            while self.pending:
                self.fetch()
            self.step()
        raise AssertionError("the requests do not end")

    def expected(
        self, adapter_id: str | None, prompt: Sequence[int], *, index: int = 0, **params: Any
    ) -> Outcome:
        """The true outcome of what ``submit`` was given."""
        return expected_outcome(
            adapter_id,
            prompt,
            SamplingParams(**{"temperature": 0.0, **params}),
            index=index,
            eos=self.eos,
            max_model_len=self.max_model_len,
        )

    def check_idle(self) -> None:
        """Assert that nothing is held for requests any more."""
        self.core.check()
        stats = self.core.stats()
        assert not self.core.has_work
        assert self.worker.num_outstanding == 0
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        named = {entry.adapter_id for entry in self.catalog}
        assert self.catalog.held() == named
        in_memory = {i.adapter_id for i in self.core.adapters.infos() if i.in_host_memory}
        assert self.worker.installed.keys() == in_memory <= named
        assert set(self.worker.slots.values()) <= named
        assert stats.slots_used == len(self.worker.slots)

    def _take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.outcomes[delta.request_id][delta.index].push(delta)
        self._settle()

    def _settle(self) -> None:
        self.core.check()
        self.pending += self.core.take_fetches()
        self.core.check()
