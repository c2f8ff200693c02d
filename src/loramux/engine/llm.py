"""The offline engine: prompts in, finished answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from loramux.config import EngineOptions
from loramux.engine.adapters import AdapterReader
from loramux.engine.build import Parts, build_parts
from loramux.engine.fetcher import Fetcher, Outcome
from loramux.engine.interface import TextCodec
from loramux.engine.origins import Origin
from loramux.errors import EmbeddingFailed, InvalidRequest
from loramux.stats import EngineStats
from loramux.types import (
    AdapterInfo,
    Completion,
    Delta,
    EmbeddingRequest,
    EngineRequest,
    GenerationRequest,
    PoolingParams,
    RequestId,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    numbers_of,
)

Prompt = str | Sequence[int]


class LLM:
    """A base model with adapters, in the calling thread.

    >>> llm = LLM("path/to/base", adapters={"pirate": "path/to/pirate"})
    >>> llm.generate(["Hello", "Hello"], adapter=[None, "pirate"])  # one batch

    Raises ConfigError, ModelNotServable or AdapterError when something cannot be served.
    """

    def __init__(
        self,
        base: str,
        *,
        adapters: Mapping[str, str] | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        """``adapters`` maps names to sources: directories, ``hf:org/repo`` or URLs."""
        adapters = adapters or {}
        parts = build_parts(base, options or EngineOptions(), adapters=adapters)
        self._attach(parts, adapters)

    @classmethod
    def over(cls, parts: Parts, adapters: Mapping[str, str] | None = None) -> LLM:
        """An LLM over an engine that has been built otherwise, as for a model in memory."""
        llm = cls.__new__(cls)
        llm._attach(parts, adapters or {})
        return llm

    def _attach(self, parts: Parts, adapters: Mapping[str, str]) -> None:
        self._core = parts.core
        self._admission = parts.admission
        self._languages = parts.languages
        self._reader = AdapterReader(parts.worker, parts.sources, parts.languages)
        self._fetched: SimpleQueue[tuple[Origin, Outcome]] = SimpleQueue()
        self._fetcher = Fetcher(self._reader, lambda *fetched: self._fetched.put(fetched))
        for name, source in adapters.items():
            self.load_adapter(name, source)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids) in one continuous batch, in their order.

        ``params``, ``adapter`` and ``priority`` are for all prompts or one for each; the adapter
        None is the base model, and prompts whose priority is a lower number are served first.
        Prompts share the prefix cache with those of the same ``cache_salt`` alone.
        Raises UnknownModel or InvalidRequest, and then runs nothing; EngineStopped once a step has
        failed.
        """
        given = _as_prompts(prompts)
        all_params = _one_each("params", params or SamplingParams(), len(given), SamplingParams)
        models = _one_each("adapter", adapter, len(given), str | None)
        priorities = _one_each("priority", priority, len(given), int)
        prompt_ids = self._encoded(given, models)
        requests = [
            GenerationRequest(
                prompt_token_ids=ids, params=p, model=model, cache_salt=cache_salt, priority=number
            )
            for ids, p, model, number in zip(
                prompt_ids, all_params, models, priorities, strict=True
            )
        ]
        outputs = [_Output(request) for request in requests]
        request_ids = self._run(requests, outputs)
        return [o.finished(id_) for o, id_ in zip(outputs, request_ids, strict=True)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[list[float]]:
        """A vector for each prompt, all in one batch; arguments as in ``generate``.

        Raises as ``generate`` does, and EmbeddingFailed where a prompt has no vector (its adapter
        cannot be read any more, its hidden states are not finite).
        """
        given = _as_prompts(prompts)
        models = _one_each("adapter", adapter, len(given), str | None)
        priorities = _one_each("priority", priority, len(given), int)
        requests = [
            EmbeddingRequest(
                prompt_token_ids=ids,
                params=params or PoolingParams(),
                model=model,
                cache_salt=cache_salt,
                priority=number,
            )
            for ids, model, number in zip(
                self._encoded(given, models), models, priorities, strict=True
            )
        ]
        vectors = [_Vector() for _ in requests]
        self._run(requests, vectors)
        return [vector.numbers() for vector in vectors]

    def chat(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of messages) through the model's chat template."""
        models = _one_each("adapter", adapter, len(conversations), str | None)
        prompts = [
            self.text_of(model).render_chat(messages)
            for messages, model in zip(conversations, models, strict=True)
        ]
        return self.generate(
            prompts, params, adapter=models, cache_salt=cache_salt, priority=priority
        )

    def text_of(self, adapter: str | None = None) -> TextCodec:
        """Text to tokens and back, by the tokenizer of an adapter or of the base.

        Raises UnknownModel.
        """
        return self._languages.of(self._admission.catalog.id_of(adapter)).text

    def load_adapter(self, name: str, source: str, *, replace: bool = False) -> AdapterInfo:
        """Read, check and name an adapter. Raises AdapterError with every reason."""
        self._admission.catalog.check_name(name, replace=replace)
        incoming = self._reader.read(name, source)
        return self._core.register(name, source, incoming, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter. Raises UnknownAdapter."""
        self._core.adapters.unregister(name)

    def adapters(self) -> list[AdapterInfo]:
        return self._core.adapters.infos()

    def stats(self) -> EngineStats:
        return self._core.stats()

    def _encoded(
        self, prompts: Sequence[Prompt], models: Sequence[str | None]
    ) -> list[Sequence[int]]:
        """The tokens of each prompt, by the tokenizer of its model. Raises UnknownModel."""
        return [
            self.text_of(model).encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt, model in zip(prompts, models, strict=True)
        ]

    def _run(
        self, requests: Sequence[EngineRequest], outputs: Sequence[_Output | _Vector]
    ) -> list[RequestId]:
        """Run requests to their ends, each into its output; their ids."""
        self._core.check_alive()
        output_of: dict[RequestId, _Output | _Vector] = {}
        try:
            for request, output in zip(requests, outputs, strict=True):
                sequences = self._admission.admit(request)
                self._core.add(sequences)
                output_of[sequences[0].parent_id] = output
            while self._core.has_work:
                self._fetcher.start(self._core.take_fetches())
                for delta in [*self._take_fetched(), *self._core.step()]:
                    output_of[delta.request_id].push(delta)
        except BaseException:
            for request_id in output_of:
                self._core.abort(request_id)
            raise
        return list(output_of)

    def _take_fetched(self) -> list[Delta]:
        """Adapters that have been fetched; waits for one where no step can be made without."""
        deltas: list[Delta] = []
        while not (self._fetched.empty() and self._core.can_step):
            origin, outcome = self._fetched.get()
            if isinstance(outcome, str):
                deltas += self._core.fetch_failed(origin, outcome)
            else:
                deltas += self._core.fetched(origin, outcome)
            if not self._core.has_work:
                break
            self._fetcher.start(self._core.take_fetches())
        return deltas


class _Output:
    """Collects the deltas of one request."""

    def __init__(self, request: GenerationRequest) -> None:
        num_completions = request.num_completions
        self._request = request
        self._texts = [""] * num_completions
        self._tokens: list[list[int]] = [[] for _ in range(num_completions)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_completions)]
        self._last: dict[int, Delta] = {}
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._cached_tokens = 0

    def push(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._tokens[delta.index] += delta.token_ids
        self._logprobs[delta.index] += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if delta.index == 0:
            self._cached_tokens += delta.cached_tokens
        if delta.finish_reason is not None:
            self._last[delta.index] = delta

    def finished(self, request_id: RequestId) -> RequestOutput:
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=tuple(self._request.prompt_token_ids),
            completions=tuple(self._completion(i) for i in range(len(self._texts))),
            adapter=self._request.model,
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=self._cached_tokens,
        )

    def _completion(self, index: int) -> Completion:
        last = self._last[index]
        assert last.finish_reason is not None
        return Completion(
            index=index,
            text=self._texts[index],
            token_ids=tuple(self._tokens[index]),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=tuple(self._logprobs[index]),
        )


class _Vector:
    """Takes the one delta of an embedding."""

    def __init__(self) -> None:
        self._delta: Delta | None = None

    def push(self, delta: Delta) -> None:
        self._delta = delta

    def numbers(self) -> list[float]:
        """Raises EmbeddingFailed."""
        assert self._delta is not None, "a request has run and has no end"
        if self._delta.embedding is None:
            raise EmbeddingFailed(self._delta.error or "the request was aborted")
        return numbers_of(self._delta.embedding)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _one_each(name: str, value: Any, count: int, kind: Any) -> list[Any]:
    """A value for all prompts, or the list with one for each. Raises InvalidRequest."""
    if isinstance(value, kind):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts", name)
    return list(value)
