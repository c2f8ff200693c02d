"""One sequence on its way through the engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from loramux.guide import Matcher
from loramux.scheduling.prefixes import PrefixKeys
from loramux.types import (
    AdapterId,
    PoolingParams,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    Waited,
)

Turn = tuple[int, int, int]
"""Priority, virtual start (0 without shares) and arrival: the least one is served first."""


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and the output it has so far.

    A request with ``n`` completions enters as ``n`` of these, with one ``parent_id`` and the
    indices 0 … n-1; ``request_id`` is unique. An embedding is an output of one token that has no
    number and never lands.
    """

    request_id: RequestId
    parent_id: RequestId
    index: int
    params: SamplingParams | PoolingParams
    seed: int
    adapter_id: AdapterId | None
    tokens: list[int]
    """Prompt and output as far as it is known. The last one has no KV entry until the next step."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and output together may be this long."""
    adapter: str | None
    """The name that ``adapter_id`` was asked for by."""
    matcher: Matcher | None = None
    """What follows its output through its guide, with each token that lands."""
    prefix: PrefixKeys | None = None
    """By which its full blocks are found; None where it neither looks for blocks nor leaves any."""
    priority: int = 0
    """The lower the number, the earlier it is served."""
    turn: Turn = (0, 0, 0)
    """Its place among all requests, given by the scheduler."""
    num_in_flight: int = 0
    """Tokens that follow ``tokens``: launched steps sample them, and nobody knows them yet."""
    num_computed: int = 0
    """Tokens whose keys and values are in ``blocks`` once all launched steps have run."""
    most_computed: int = 0
    """The largest ``num_computed`` with which it has stopped to run."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """KV blocks in the order of its tokens; of 32 bits each, as attention reads them."""
    num_known_blocks: int = 0
    """The first of ``blocks``, which can be found by others."""
    num_cached: int = 0
    """Tokens of its prompt that it found computed when it first started."""
    running: bool = False
    num_at_start: int = 0
    """Prompt and output when it last started to run."""
    num_preemptions: int = 0
    queued_at: float = 0.0
    """By the scheduler's clock."""
    without_slot_since: float | None = None
    """When it could first have started but for the slot of its adapter."""
    waited: Waited | None = None
    """Up to its first start."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def note_without_slot(self, now: float) -> None:
        """Its turn has come, and its adapter has no slot."""
        if self.without_slot_since is None:
            self.without_slot_since = now

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with the tokens in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be chosen."""
        return self.num_tokens - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Output, with the tokens in flight."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_used(self) -> int:
        """Tokens that were computed or chosen for it; right while it does not run.

        Each counts once, though a preemption has it computed again.
        """
        has_output = len(self.tokens) > self.num_prompt_tokens
        return (len(self.tokens) if has_output else self.most_computed) - self.num_cached

    @property
    def has_gained(self) -> bool:
        """Whether it has got a token since it started to run, so that it gets on by and by."""
        return self.num_tokens > self.num_at_start

    @property
    def ends_in_flight(self) -> bool:
        """Whether a token in flight is the last one that there is room for."""
        return self.num_in_flight > 0 and self.num_tokens >= self.max_total_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt log-probabilities were asked for and are not all known."""
        params = self.params
        if isinstance(params, PoolingParams) or params.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def needs_every_token(self) -> bool:
        """Whether what it asks for comes out of computing each token of its prompt, so that it may
        find none computed."""
        if isinstance(self.params, PoolingParams):
            return self.params.pooling == "mean"
        return self.wants_prompt_logprobs

    def land(self, token_id: int) -> None:
        """Take the first token in flight, which is known now."""
        assert self.num_in_flight, "a token that no step samples"
        self.num_in_flight -= 1
        self.tokens.append(token_id)
