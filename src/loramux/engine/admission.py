"""Turns a request from outside into sequences, or refuses it with the reason."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loramux.adapters.catalog import Catalog, Entry
from loramux.engine.interface import EngineText
from loramux.engine.languages import Languages
from loramux.errors import AdapterReplaced, InvalidRequest
from loramux.guide import Grammar
from loramux.scheduling.prefixes import PrefixKeys
from loramux.scheduling.request import Request
from loramux.types import (
    AdapterId,
    EmbeddingRequest,
    EngineRequest,
    GenerationRequest,
    RequestId,
    new_request_id,
)


@dataclass(frozen=True)
class Limits:
    """What any request must keep to."""

    max_model_len: int
    vocab_size: int
    """Of the base; an adapter may have more tokens."""
    prefix_block: int | None = None
    """Tokens in one block of the prefix cache; None: there is no such cache."""


@dataclass(frozen=True)
class _Needs:
    """What a request asks of the model that it goes to."""

    model: str | None
    extremes: Mapping[str, tuple[int, int]]
    """The least and the largest token id of each field that has any."""
    codec: str | None
    """Key of the codec whose tokens and grammar they are; None: anybody's."""


class Admission:
    """Checks requests against the limits and the catalog; holds their adapters while they run."""

    def __init__(self, catalog: Catalog, limits: Limits, languages: Languages) -> None:
        self.catalog = catalog
        self.limits = limits
        self._languages = languages

    def compiler_of(self, request: GenerationRequest) -> EngineText:
        """The codec to compile a request's guide with. Raises UnknownModel or AdapterReplaced."""
        text = self._languages.of(self.catalog.id_of(request.model)).text
        if request.codec not in (None, text.key):
            raise AdapterReplaced(str(request.model))
        return text

    def admit(self, request: EngineRequest, grammar: Grammar | None = None) -> list[Request]:
        """One sequence for each completion asked for, all holding the adapter.

        ``grammar`` is what the request's codec has made of its guide; if not, it is compiled here.
        Raises UnknownModel, AdapterReplaced, InvalidRequest or MissingPackage, and then holds
        nothing.
        """
        prompt = list(request.prompt_token_ids)
        self._check_tokens(prompt)
        if request.cache_salt == "":
            raise InvalidRequest("cache_salt is empty: send a text, or none", "cache_salt")
        max_total = self._check_length(request)
        named: dict[str, Sequence[int]] = {"prompt": prompt}
        codec, seed = request.codec, 0
        if isinstance(request, GenerationRequest):
            params = request.params
            named["stop_token_ids"] = params.stop_token_ids
            named["logit_bias"] = [token for token, _ in params.logit_bias]
            if params.guide is not None and grammar is None:
                text = self.compiler_of(request)
                grammar, codec = text.compile(params.guide), text.key
            seed = random.getrandbits(63) if params.seed is None else params.seed
        extremes = {p: (min(ids), max(ids)) for p, ids in named.items() if ids}
        needs = _Needs(request.model, extremes, codec)
        parent_id, count = request.request_id or new_request_id(), request.num_completions
        adapter_id = self.catalog.hold(
            request.model, count, check=lambda entry: self._check_model(entry, needs)
        )
        prefix = self._prefix(prompt, adapter_id, request.cache_salt)
        return [
            Request(
                request_id=RequestId(f"{parent_id}/{index}"),
                parent_id=parent_id,
                index=index,
                params=request.params,
                seed=seed + index,
                adapter_id=adapter_id,
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                max_total_tokens=max_total,
                adapter=None if adapter_id is None else request.model,
                matcher=None if grammar is None else grammar.matcher(),
                prefix=None if prefix is None else prefix.copy(),
                priority=request.priority,
            )
            for index in range(count)
        ]

    def _prefix(
        self, prompt: Sequence[int], adapter_id: AdapterId | None, cache_salt: str | None
    ) -> PrefixKeys | None:
        """The keys of the prompt's blocks, made here once for all completions and off the steps."""
        size = self.limits.prefix_block
        if size is None:
            return None
        prefix = PrefixKeys.of(adapter_id, cache_salt, size)
        prefix.between(0, len(prompt) // size, prompt)
        return prefix

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidRequest("the prompt is empty: send at least one token", "prompt")
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            raise InvalidRequest("prompt token ids must be integers", "prompt")

    def _check_model(self, entry: Entry | None, needs: _Needs) -> None:
        """Check what hangs on the model; None is the base. Quick, since the catalog waits."""
        vocab = self.limits.vocab_size
        if entry is not None:
            vocab = entry.vocab_size or vocab
        for param, ids in needs.extremes.items():
            wrong = next((token for token in ids if not 0 <= token < vocab), None)
            if wrong is not None:
                raise InvalidRequest(f"token id {wrong} is not in 0 … {vocab - 1}", param)
        adapter_id = None if entry is None else entry.adapter_id
        if needs.codec not in (None, self._languages.of(adapter_id).text.key):
            raise AdapterReplaced(str(needs.model))

    def _check_length(self, request: EngineRequest) -> int:
        """Length of prompt and output together."""
        prompt, limit = len(request.prompt_token_ids), self.limits.max_model_len
        # A token that is chosen has a place in the context, an embedding has none.
        longest = limit if isinstance(request, EmbeddingRequest) else limit - 1
        if prompt > longest:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and the context {limit}: "
                f"shorten it to {longest} or less",
                "prompt",
            )
        if isinstance(request, EmbeddingRequest):
            return prompt + 1
        max_tokens, min_tokens = request.params.max_tokens, request.params.min_tokens
        if max_tokens is not None and prompt + max_tokens > limit:
            raise InvalidRequest(
                f"max_tokens ({max_tokens}) and the prompt ({prompt} tokens) exceed the context of "
                f"{limit}: ask for {limit - prompt} tokens or less",
                "max_tokens",
            )
        if min_tokens > limit - prompt:
            raise InvalidRequest(
                f"min_tokens ({min_tokens}) does not fit behind {prompt} prompt tokens",
                "min_tokens",
            )
        return limit if max_tokens is None else prompt + max_tokens
