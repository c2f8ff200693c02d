"""What one key may use, and what it has used: requests a second, tokens a minute, places."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from loramux.errors import KeyLimitReached

Clock = Callable[[], float]
"""Seconds that only go forward."""

_PLACE_SECONDS = 1.0
"""When a running request ends nobody knows, so this is how long to wait before asking again."""
_ROUNDING = 1e-6
"""Missing by so little is not missing: who waits as long as was said must find enough."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most that a key may use; None is no limit."""

    requests_per_second: float | None = None
    tokens_per_minute: int | None = None
    max_in_flight: int | None = None


class Bucket:
    """Holds up to ``capacity``, comes back at ``rate`` a second, and may be taken below zero."""

    def __init__(self, *, rate: float, capacity: float, clock: Clock) -> None:
        self._rate = rate
        self._capacity = capacity
        self._clock = clock
        self._level = capacity
        self._filled = clock()

    def change(self, *, rate: float, capacity: float) -> None:
        """From now on; what it holds stays, as far as there is room."""
        self._fill()
        self._rate, self._capacity = rate, capacity
        self._level = min(self._level, capacity)

    def wait(self, amount: float) -> float:
        """Seconds until it holds ``amount``, or all that it can hold where that is less."""
        self._fill()
        missing = min(amount, self._capacity) - self._level
        return missing / self._rate if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take ``amount``, whether it is there or not."""
        self._fill()
        self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._filled) * self._rate)
        self._filled = now


class Account:
    """What one key has used since the start of the server."""

    def __init__(self, name: str, limits: Limits, *, clock: Clock = time.monotonic) -> None:
        """``name`` is that of the key, for errors and metrics."""
        self.name = name
        self.in_flight = 0
        """Requests that run or wait."""
        self.num_requests = 0
        """Of all, refused ones included."""
        self.num_tokens = 0
        """Of prompts and of answers."""
        self.num_refused: Counter[str] = Counter()
        """Requests by the limit that they met."""
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.change_limits(limits)

    def change_limits(self, limits: Limits) -> None:
        """Hold it to these from now on. What it has used counts: a change is no new start."""
        self._limits = limits
        self._requests = self._changed(self._requests, limits.requests_per_second, seconds=1)
        self._tokens = self._changed(self._tokens, limits.tokens_per_minute, seconds=60)

    def _changed(
        self, old: Bucket | None, amount: float | None, *, seconds: float
    ) -> Bucket | None:
        """A bucket that holds, and gets in so many ``seconds``, an ``amount``."""
        if amount is None:
            return None
        # Less than one would never let a request in.
        rate, capacity = amount / seconds, max(1.0, amount)
        if old is None:
            return Bucket(rate=rate, capacity=capacity, clock=self._clock)
        old.change(rate=rate, capacity=capacity)
        return old

    def enter(self) -> None:
        """Take a place for a request, which ``leave`` must give back. Raises KeyLimitReached."""
        self.num_requests += 1
        places = self._limits.max_in_flight
        if places is not None and self.in_flight >= places:
            raise self._refusal("max_in_flight", _PLACE_SECONDS)
        if self._requests is not None:
            if wait := self._requests.wait(1):
                raise self._refusal("requests_per_second", wait)
            self._requests.take(1)
        self.in_flight += 1

    def leave(self) -> None:
        """Give the place back."""
        self.in_flight -= 1

    def spend_prompt(self, num_tokens: int) -> None:
        """Charge a prompt. Raises KeyLimitReached where it has to wait."""
        if self._tokens is not None and (wait := self._tokens.wait(num_tokens)):
            raise self._refusal("tokens_per_minute", wait)
        self.spend(num_tokens)

    def refund(self, num_tokens: int) -> None:
        """Take back what was charged for a prompt that has not been submitted."""
        self.spend(-num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Charge tokens that have been submitted or made, whether they were left or not."""
        self.num_tokens += num_tokens
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def _refusal(self, limit: str, wait: float) -> KeyLimitReached:
        self.num_refused[limit] += 1
        return KeyLimitReached(
            self.name, limit, getattr(self._limits, limit), retry_after_seconds=wait
        )
