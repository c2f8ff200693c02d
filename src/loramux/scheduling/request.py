"""One sequence on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from loramux.types import AdapterId, RequestId, SamplingParams, TokenLogprobs


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and the output it has so far.

    A request with ``n`` completions enters as ``n`` of these, with one ``parent_id`` and the
    indices 0 … n-1; ``request_id`` is unique.
    """

    request_id: RequestId
    parent_id: RequestId
    index: int
    params: SamplingParams
    seed: int
    adapter_id: AdapterId | None
    tokens: list[int]
    """Prompt and output. The last one has no KV entry until the next step."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Prompt and output together may be this long."""
    arrival: int = 0
    """Place in the order of arrival, given by the scheduler."""
    num_computed: int = 0
    """Tokens whose keys and values are in ``blocks``."""
    blocks: list[int] = field(default_factory=list)
    running: bool = False
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be chosen."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some prompt log-probabilities were asked for and are not all known."""
        asked = self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
