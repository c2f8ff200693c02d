"""Orders for one step: the engine decides, the workers carry out and report back. Plain data.

What there is one of for each sequence of each step is a named tuple, which takes a third of the
time to make that a frozen dataclass does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from loramux.types import AdapterId, RequestId, SamplingParams, Slot, TokenLogprobs

PENDING_TOKEN = -1
"""As the only token of a sequence's step: what the step launched just before samples for it.

The host does not know it yet and the worker need not wait for it, because steps run in the order in
which they are launched. The sample of such a row has no penalties, no forbidden tokens and no mask
of allowed ones. The row is wasted when that token turns out to end the sequence or to be an error:
it must do no harm then, and nobody reads its result.
"""


LOAD_BYTES = 128 * 2**20
"""Of adapters, copied to a device with one step so that none is held up. Over PCIe 5 that takes
2.5 ms, which pass while the step before runs: 5 to 10 for 8 billion weights."""


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Fill ``slot`` with an adapter's weights before the step; what it held before is dropped."""

    slot: Slot
    adapter_id: AdapterId
    generation: int


@dataclass(frozen=True, slots=True)
class SlotClear:
    """Free the weights of ``slot``."""

    slot: Slot


SlotOrder = SlotLoad | SlotClear


class Sample(NamedTuple):
    """Choose the next token of a sequence at the end of this step."""

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    """Prompt and output so far, without a token that is pending; read at launch, never kept."""
    num_prompt_tokens: int
    position: int
    """Place in the output of the token to choose, from 0; a pending token is counted."""
    forbidden: tuple[int, ...] = ()
    """Tokens that may not be chosen now (ends before ``min_tokens``)."""
    allowed: bytes | None = None
    """The tokens that a guide allows now, as in ``guide.Matcher``; None allows all."""


HiddenPart = Literal["last", "sum"]
"""Of a sequence's hidden states in a step: the last token's, or the sum over all tokens'."""


class SequenceStep(NamedTuple):
    """One sequence's part of a step: ``token_ids`` stand at ``start``, ``start + 1``, …"""

    request_id: RequestId
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    """KV blocks in the order of its tokens. Those before ``start`` may be in other tables, too, and
    be written by another sequence in this step."""
    slot: Slot
    sample: Sample | None = None
    prompt_logprobs: int | None = None
    """Report log-probabilities of the tokens that follow each of ``token_ids`` in the prompt."""
    next_prompt_tokens: Sequence[int] = ()
    """The prompt tokens at ``start + 1``, …; as many as have a log-probability to report."""
    hidden: HiddenPart | None = None
    """Report this of what the model gives to its head."""

    @property
    def end(self) -> int:
        """Behind the place of its last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Slot orders first, in their order, then one forward over all sequences."""

    slot_orders: tuple[SlotOrder, ...]
    sequences: tuple[SequenceStep, ...]


class SequenceResult(NamedTuple):
    """What a worker reports for one sequence of a plan."""

    request_id: RequestId
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    """The sequence alone cannot go on (its logits or hidden states are not finite)."""
    hidden: bytes | None = None
    """The vector that was asked for: numbers of 32 bits, little-endian."""


@dataclass(frozen=True, slots=True)
class StepResult:
    sequences: tuple[SequenceResult, ...] = field(default=())
