"""From a sequence's new token to what a client sees of it."""

from __future__ import annotations

from collections.abc import Collection

from loramux.engine.completion import CompletionText
from loramux.engine.interface import Detokenizer
from loramux.guide import GuideFailed
from loramux.plan import SequenceResult
from loramux.scheduling.request import Request
from loramux.scheduling.stop import Finish, StopText, StopTokens
from loramux.types import Delta, SamplingParams, TokenLogprobs


class Answer:
    """Turns the results of one sequence into deltas."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        detokenizer: Detokenizer,
        eos_token_ids: Collection[int],
    ) -> None:
        self._request = request
        self._asks_prompt = params.prompt_logprobs is not None
        self._stop_tokens = StopTokens(
            params,
            eos_token_ids=eos_token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            max_model_len=request.max_total_tokens,
        )
        self._text = CompletionText(
            self._stop_tokens,
            StopText(params.stop, include_stop=params.include_stop_str_in_output),
            detokenizer,
        )
        self._is_first = True

    def forbidden_tokens(self) -> tuple[int, ...]:
        """Tokens that may not be chosen next."""
        return self._stop_tokens.forbidden_tokens(self._request.num_output_tokens)

    def push(self, result: SequenceResult) -> Delta:
        """The delta of a token that has just been added to the request."""
        assert result.token_id is not None
        text, finish = self._text.push(result.token_id)
        error: str | None = None
        if finish is None or finish.reason == "length":
            guided, error = self._follow_guide(result.token_id)
            if guided is not None and finish is None:
                text += self._text.finish()
                finish = guided
            elif guided is not None and guided.reason == "stop":
                finish = guided  # what is complete has not been cut off
        return self._delta(
            text,
            finish,
            token_ids=(result.token_id,),
            logprobs=() if result.logprobs is None else (result.logprobs,),
            error=error if finish is not None and finish.reason == "error" else None,
        )

    def fail(self, error: str) -> Delta:
        """The last delta of a completion that cannot go on."""
        return self._delta(self._text.finish(), Finish("error"), error=error)

    def abort(self) -> Delta:
        """The last delta of a completion that nobody waits for."""
        return self._delta(self._text.finish(), Finish("abort"))

    def _follow_guide(self, token_id: int) -> tuple[Finish | None, str | None]:
        """How the newest token ends the answer by its guide, if so, and what is wrong with it."""
        matcher = self._request.matcher
        try:
            if matcher is None or not matcher.push(token_id):
                return None, None
        except GuideFailed as failure:
            return Finish("error"), f"the answer cannot go on as its guide demands: {failure}"
        return Finish("stop"), None

    def _delta(
        self,
        text: str,
        finish: Finish | None,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> Delta:
        request = self._request
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        # A completion that ends before its prompt has been read reports none rather than a part.
        if self._is_first and self._asks_prompt and not request.wants_prompt_logprobs:
            prompt_logprobs = (None, *request.prompt_logprobs)
        cached_tokens = request.num_cached if self._is_first else 0
        waited = request.waited if self._is_first else None
        self._is_first = False
        return Delta(
            request_id=request.parent_id,
            index=request.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop_reason,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached_tokens,
            error=error,
            waited=waited,
        )
