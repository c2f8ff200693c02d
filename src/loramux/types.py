"""Names, sampling parameters and outputs that every layer shares. No torch here."""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NewType, get_args

from loramux.errors import InvalidRequest
from loramux.guide import Guide

AdapterId = NewType("AdapterId", str)
"""Digest of an adapter's weights and effective configuration; a name is a label on it."""

RequestId = NewType("RequestId", str)


def new_request_id() -> RequestId:
    """An id that no other request has."""
    return RequestId(f"req-{uuid.uuid4().hex}")


Slot = NewType("Slot", int)
"""Column of the slot tables; the slot ``max_loras`` is the base model."""

FinishReason = Literal["stop", "length", "abort", "error"]

Tier = Literal["slot", "host", "source"]
"""The best place that an adapter is in; who has a slot has a copy in host memory as well."""

Pooling = Literal["last", "mean"]
"""What an embedding is made of: the last token's hidden state, or the mean over all tokens'."""

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BIASES = 1024
MAX_PRIORITY = 2**31 - 1
MIN_PRIORITY = -(2**31)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Filters act in the order of transformers' ``generate``: penalties, temperature, top_k, top_p,
    min_p. Log-probabilities are those of the model itself, before any of them. ``temperature`` 0
    is greedy. Raises InvalidRequest, which names the field, for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """The same seed gives the same text, whoever else is in the batch."""
    max_tokens: int | None = None
    """None: up to the end of the context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[str, ...] = ()
    """Special tokens, as they read, that stay in the text where others are skipped."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits before all else, from -100 to 100; a mapping is
    taken as well."""
    logprobs: int | None = None
    """Log-probability of each chosen token and of this many most likely ones."""
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    """What the answer must look like; it ends where that is complete."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "kept_special_tokens"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _integer("n", self.n, low=1, high=MAX_N)
        _number("temperature", self.temperature, low=0.0, high=100.0)
        _integer("top_k", self.top_k, low=-1)
        _number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        for name in ("stop", "kept_special_tokens"):
            if not all(isinstance(s, str) and s for s in getattr(self, name)):
                raise InvalidRequest(f"{name} must hold strings that are not empty", name)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", name)
        self._check_bias()
        self._check_guide()

    def _check_bias(self) -> None:
        given: object = self.logit_bias
        pairs = tuple(sorted(given.items() if isinstance(given, Mapping) else self.logit_bias))
        if len(pairs) > MAX_BIASES:
            raise InvalidRequest(
                f"logit_bias has {len(pairs)} tokens, the limit is {MAX_BIASES}", "logit_bias"
            )
        for token, bias in pairs:
            _integer("logit_bias", token, low=0)
            _number("logit_bias", bias, low=-100.0, high=100.0)
        if len(dict(pairs)) < len(pairs):
            raise InvalidRequest("logit_bias has a token twice", "logit_bias")
        object.__setattr__(self, "logit_bias", pairs)

    def _check_guide(self) -> None:
        guide = self.guide
        if guide is None:
            return
        if not isinstance(guide, Guide):
            raise InvalidRequest(f"guide must be a Guide, not {guide!r}", "guide")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                # Where the guide is complete nothing but an end may follow.
                raise InvalidRequest(
                    f"{name} and {guide.param} contradict each other, since the latter says where "
                    "the answer ends: leave one of them out",
                    name,
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How to make one vector of a prompt's hidden states, which are those behind the last norm.

    Raises InvalidRequest, which names the field, for a value that it cannot have.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    """Whether the vector is divided by its length."""

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            known = " or ".join(get_args(Pooling))
            raise InvalidRequest(f"pooling must be {known}, not {self.pooling!r}", "pooling")
        if not isinstance(self.normalize, bool):
            raise InvalidRequest("normalize must be true or false", "normalize")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and the most likely tokens at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Waited(NamedTuple):
    """Seconds that a sequence waited before its first step."""

    queue_seconds: float
    """From its arrival in the engine."""
    slot_seconds: float
    """Those since it could have started but for the slot of its adapter; 0 for the base."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to one completion of a request.

    ``text`` holds whole characters only; the deltas of a completion concatenate to its final text.
    An embedding comes as the only delta of its request.
    """

    request_id: RequestId
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token that ended the completion, where one did."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first delta of each completion that asked for them; None for the first prompt token.

    Absent when the completion ends (abort, error) before its prompt has been read.
    """
    cached_tokens: int = 0
    """With the first delta of each completion: tokens of its prompt found in the prefix cache."""
    error: str | None = None
    waited: Waited | None = None
    """With the first delta of each completion that has started."""
    embedding: bytes | None = None
    """Numbers of 32 bits, little-endian."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request of the offline API."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    adapter: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that the first completion found in the prefix cache."""

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.completions[0].text


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What the outside may know of an adapter."""

    name: str
    adapter_id: AdapterId
    source: str
    num_bytes: int
    max_rank: int
    pinned: bool
    slot: int | None
    tier: Tier
    """From ``source`` it is read again when a request needs it."""
    in_flight: int
    """Sequences that run or wait."""
    last_used: float | None = None
    """Unix time at which a sequence of it was last queued or ended; names of one id share it."""
    last_error: str | None = None
    """Why it could not be read again, if the last attempt has failed."""
    warnings: tuple[str, ...] = ()
    vocab_size: int | None = None
    """Its tokens, where they are more than the base's."""
    weight: float | None = None
    """Of its share of the tokens; None where adapters have no shares."""

    @property
    def in_host_memory(self) -> bool:
        return self.tier != "source"


@dataclass(frozen=True, slots=True)
class SourceRules:
    """Where adapters may come from whose source is named by somebody else than the operator."""

    root: str | None = None
    """Directory that local ones must lie in; None allows every directory."""
    prefixes: tuple[str, ...] = ()
    """Beginnings of remote sources; none allows no remote source."""


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """What all requests to an engine have. ``model`` is the base model's or an adapter's name.

    Raises InvalidRequest for a priority out of range.
    """

    prompt_token_ids: Sequence[int]
    model: str | None = None
    """None: the base model."""
    request_id: RequestId | None = None
    cache_salt: str | None = None
    """Requests share KV blocks only with those of the same salt; None is one, too."""
    codec: str | None = None
    """Key of the ``TextCodec`` that the tokens are for: an adapter with another one is not to have
    them. None: anybody's."""
    priority: int = 0
    """Requests with a lower number are more urgent: they are served first."""

    def __post_init__(self) -> None:
        _integer("priority", self.priority, low=MIN_PRIORITY, high=MAX_PRIORITY)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(PromptRequest):
    """A prompt to continue."""

    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def num_completions(self) -> int:
        return self.params.n


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest(PromptRequest):
    """A prompt to make a vector of. It ends when it has been read."""

    params: PoolingParams = field(default_factory=PoolingParams)

    @property
    def num_completions(self) -> int:
        return 1


EngineRequest = GenerationRequest | EmbeddingRequest


def numbers_of(embedding: bytes) -> list[float]:
    """The numbers of a delta's embedding."""
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} must be {bound}, not {value}", name)


def _number(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", name)
    if value < low or value > high or (low_open and value == low):
        bound = f"above {low}" if low_open else f"at least {low}"
        raise InvalidRequest(f"{name} must be {bound} and at most {high}, not {value}", name)
