"""What a comparison with PEFT finds, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "differs", "refused", "not compared"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the answers, both counted from 0."""

    prompt: int
    token: int


@dataclass(frozen=True, kw_only=True)
class OtherToken:
    """Where two greedy answers part; behind it they cannot be compared."""

    spot: Spot
    token_id: int
    """Ours."""
    peft_token_id: int
    peft_lead: float
    """PEFT's log-probability of its own token minus that of ours."""
    near_tie: bool
    """Whether two log-probabilities that are off by the tolerance can change places."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found about one adapter, or about the base alone (``adapter`` None)."""

    adapter: str | None
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    """Why it is refused or not compared, or what beside numbers differs."""
    remarks: tuple[str, ...] = ()
    """PEFT's own, when it loaded the adapter."""
    largest_difference: float | None = None
    """Of a log-probability."""
    largest_at: Spot | None = None
    first_other_token: OtherToken | None = None
    """One that is no near tie, if there is any."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Everything; the fields are those of ``--json``."""

    agrees: bool
    base: str
    dtype: str
    tolerance: float
    prompts: tuple[str, ...]
    max_tokens: int
    num_likeliest: int
    adapters_in_one_step: int
    comparisons: tuple[Comparison, ...]
