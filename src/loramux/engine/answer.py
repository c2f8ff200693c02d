"""From a sequence's new token to what a client sees of it."""

from __future__ import annotations

from collections.abc import Collection

from loramux.engine.interface import Detokenizer
from loramux.plan import SequenceResult
from loramux.scheduling.request import Request
from loramux.scheduling.stop import Finish, StopText, StopTokens
from loramux.types import Delta, TokenLogprobs


class Answer:
    """The text side of one completion: whole characters, stop strings, the reason it ends."""

    def __init__(
        self, request: Request, detokenizer: Detokenizer, eos_token_ids: Collection[int]
    ) -> None:
        params = request.params
        self._request = request
        self._detokenizer = detokenizer
        self._stop_text = StopText(params.stop, include_stop=params.include_stop_str_in_output)
        self._stop_tokens = StopTokens(
            params,
            eos_token_ids=eos_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            max_model_len=request.max_total_tokens,
        )
        self._first = True

    def forbidden_tokens(self) -> tuple[int, ...]:
        """Tokens that may not be chosen next."""
        return self._stop_tokens.forbidden_tokens(self._request.num_output_tokens)

    def push(self, result: SequenceResult) -> Delta:
        """The delta of a token that has just been added to the request."""
        assert result.token_id is not None
        text, finish = self._advance(result.token_id)
        return self._delta(
            text=text,
            token_ids=(result.token_id,),
            logprobs=() if result.logprobs is None else (result.logprobs,),
            finish=finish,
        )

    def fail(self, error: str) -> Delta:
        """The last delta of a completion that cannot go on."""
        text = self._detokenizer.finish() + self._stop_text.finish()
        return self._delta(text=text, finish=Finish("error"), error=error)

    def abort(self) -> Delta:
        """The last delta of a completion that nobody waits for."""
        text = self._detokenizer.finish() + self._stop_text.finish()
        return self._delta(text=text, finish=Finish("abort"))

    def _advance(self, token_id: int) -> tuple[str, Finish | None]:
        num_output = self._request.num_output_tokens
        finish = self._stop_tokens.check(token_id, num_output)
        may_stop = self._stop_tokens.may_stop(num_output)
        if finish is not None and finish.reason == "stop":
            piece = self._detokenizer.finish()
        else:
            piece = self._detokenizer.push(token_id)
            if finish is not None:
                piece += self._detokenizer.finish()
        shown, stop = self._stop_text.push(piece, may_stop=may_stop)
        if stop is not None:
            return shown, Finish("stop", stop)
        if finish is not None:
            shown += self._stop_text.finish()
        return shown, finish

    def _delta(
        self,
        *,
        text: str,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish: Finish | None,
        error: str | None = None,
    ) -> Delta:
        request = self._request
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        if self._first and request.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *request.prompt_logprobs)
        self._first = False
        return Delta(
            request_id=request.parent_id,
            index=request.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
            prompt_logprobs=prompt_logprobs,
            error=error,
        )
