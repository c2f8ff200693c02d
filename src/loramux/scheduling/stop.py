"""When a completion ends: by a token, by a string in its text, or for lack of room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loramux.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """How a completion ended; ``stop_reason`` as in ``Delta``."""

    reason: FinishReason
    stop_reason: str | int | None = None


class StopTokens:
    """Ends a completion by its tokens: end of sequence, stop tokens, ``max_tokens``, full context.

    ``eos_token_ids`` are the model's own ends. The first ``min_tokens`` tokens end nothing.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_token_ids: Collection[int],
        num_prompt_tokens: int,
        max_model_len: int,
    ) -> None:
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop = frozenset(params.stop_token_ids)
        self._forbidden = tuple(sorted(self._eos | self._stop))
        self._min_tokens = params.min_tokens
        room = max_model_len - num_prompt_tokens
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)

    def forbidden_tokens(self, num_output: int) -> tuple[int, ...]:
        """Tokens that may not follow ``num_output`` tokens of output: they would end it early."""
        return self._forbidden if num_output < self._min_tokens else ()

    def may_stop(self, num_output: int) -> bool:
        """Whether the ``num_output``-th token may end the completion, itself or by its text."""
        return num_output > self._min_tokens

    def check(self, token_id: int, num_output: int) -> Finish | None:
        """How the newest token, the ``num_output``-th, ends the completion, or None.

        With the reason ``stop`` the token belongs to the output but its text is not shown. With
        ``length`` its text is shown, and a stop string that it completes is the better reason.
        """
        if self.may_stop(num_output):
            if token_id in self._eos:
                return Finish("stop")
            if token_id in self._stop:
                return Finish("stop", token_id)
        return Finish("length") if num_output >= self._max_tokens else None


class StopText:
    """Finds the first stop string in a text that comes in pieces.

    First is the one that is complete first; of several that end at one character, the longest. So
    the outcome does not depend on how the text was cut into pieces. What may be the beginning of a
    stop string is held back, and nothing more.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take a piece; return what can be shown, and the stop string once it is found.

        After that, nothing more may be pushed. With ``may_stop`` false, stop strings that end in
        this piece are ordinary text.
        """
        if not self._stop:
            return text, None
        start = len(self._held)
        text = self._held + text
        if may_stop and (found := self._first(text, start)) is not None:
            end, stop = found
            self._held = ""
            return text[: end if self._include_stop else end - len(stop)], stop
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown], None

    def finish(self) -> str:
        """The text still held back, when the completion ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, start: int) -> tuple[int, str] | None:
        """End and name of the first stop string of ``text`` that ends after ``start``."""
        found = [
            (at + len(stop), stop)
            for stop in self._stop
            if (at := text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        return min(found, key=lambda it: (it[0], -len(it[1])), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
