"""One completion as it grows: what each token adds to its text, and which token ends it."""

from __future__ import annotations

from typing import Protocol

from loramux.scheduling.stop import Finish, StopText, StopTokens


class IncrementalText(Protocol):
    """Tokens to whole characters; ``engine.text.Detokenizer`` is one."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class CompletionText:
    """Joins the three that decide on a token: its text, the stop tokens and the stop strings.

    A stop string goes before ``length`` when one token brings both, and the texts that were shown
    concatenate to the completion's text, with nothing held back once it has ended.
    """

    def __init__(
        self, stop_tokens: StopTokens, stop_text: StopText, detokenizer: IncrementalText
    ) -> None:
        self._stop_tokens = stop_tokens
        self._stop_text = stop_text
        self._detokenizer = detokenizer
        self._num_output = 0

    def push(self, token_id: int) -> tuple[str, Finish | None]:
        """Take the newest token; return the text to show now, and how the completion ends if so.

        Nothing may be pushed after an end.
        """
        self._num_output += 1
        finish = self._stop_tokens.check(token_id, self._num_output)
        if finish is not None and finish.reason == "stop":
            return self.finish(), finish
        text = self._detokenizer.push(token_id)
        if finish is not None:
            text += self._detokenizer.finish()
        may_stop = self._stop_tokens.may_stop(self._num_output)
        shown, stop = self._stop_text.push(text, may_stop=may_stop)
        if stop is not None:
            return shown, Finish("stop", stop)
        return (shown, None) if finish is None else (shown + self._stop_text.finish(), finish)

    def finish(self) -> str:
        """All text that is still held back, for an end that no token brings about (an abort)."""
        shown, _ = self._stop_text.push(self._detokenizer.finish(), may_stop=False)
        return shown + self._stop_text.finish()
