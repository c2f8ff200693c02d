"""Submits requests; runs answers in text, whole or as a stream, until their client goes away."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from loramux.engine.interface import TextCodec
from loramux.errors import LoramuxError
from loramux.server.answer import Answer, Part, Usage
from loramux.server.context import ServerContext
from loramux.server.errors import PriorityRefused, describe, error_object
from loramux.server.facts import Facts
from loramux.server.keys import Caller
from loramux.server.schema import GenerationFields, PromptFields
from loramux.server.sse import DONE, EventStreamResponse, event, until_disconnect
from loramux.types import EngineRequest, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)

UNSEEN_INTERVAL = 0.5
"""Seconds between parts of an answer that is sent as a whole."""
_LAST_WORDS_SECONDS = 5.0
"""After its deadline a stream has this long to be read; who does not read holds memory."""


class Renderer(Protocol):
    """Writes an answer in the shape of one endpoint."""

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """The chunks of a stream that ``part`` gives rise to; none where it shows nothing."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that was asked to report its usage."""
        ...

    def whole(self, choices: Sequence[Part], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...


async def reply(
    request: Request,
    context: ServerContext,
    body: GenerationFields,
    codec: TextCodec,
    *,
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    renderer: Renderer,
) -> Response:
    """Submit the prompts, which ``codec`` has made, and answer.

    Raises LoramuxError for what goes wrong before the answer.
    """
    facts: Facts = request.state.facts
    facts.params = params
    answer = await submit(
        context,
        [
            GenerationRequest(prompt_token_ids=tokens, params=params, codec=codec.key)
            for tokens in prompts
        ],
        body,
        caller=caller,
        facts=facts,
        endpoint=request.url.path,
        interval=context.options.stream_interval if body.stream else UNSEEN_INTERVAL,
    )
    if body.stream:
        events = _events(answer, renderer, facts, include_usage=body.include_usage)
        return EventStreamResponse(
            events, on_close=answer.abort, cut_off_at=answer.deadline + _LAST_WORDS_SECONDS
        )
    with answer:
        choices = await until_disconnect(request.receive, answer.collect())
    return JSONResponse(renderer.whole(choices, answer.usage))


async def submit(
    context: ServerContext,
    requests: Sequence[EngineRequest],
    body: PromptFields,
    *,
    caller: Caller,
    facts: Facts,
    endpoint: str,
    interval: float,
) -> Answer:
    """Submit requests for a body, with what it says of all of them; see ``Answer.submit``.

    Raises LoramuxError.
    """
    context.check_ready()
    model = context.engine_model(body.model, caller)
    priority = caller.default_priority if body.priority is None else body.priority
    if not caller.may_have(priority):
        raise PriorityRefused(caller.account.name, priority, caller.min_priority)
    salt = caller.cache_salt(body.cache_salt)
    answer = await Answer.submit(
        context.engine,
        [replace(r, model=model, cache_salt=salt, priority=priority) for r in requests],
        timer=context.metrics.timer(endpoint),
        seconds=min(body.timeout or math.inf, context.options.max_request_seconds),
        interval=interval,
        account=caller.account,
    )
    facts.answer, facts.adapter = answer, model
    if model is not None:
        context.metrics.count_adapter(model)
    return answer


async def _events(
    answer: Answer, renderer: Renderer, facts: Facts, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Chunks as they are made. The status has been sent, so an error becomes an event too."""
    try:
        async for part in answer.parts():
            for chunk in renderer.chunks(part):
                yield event(chunk)
        if include_usage:
            yield event(renderer.usage_chunk(answer.usage))
    except LoramuxError as error:
        facts.note_error(error)
        yield event(describe(error))
    except Exception as error:
        facts.note_error(error)
        logger.exception("a stream failed")
        yield event(error_object(500, "internal error: see the server's log"))
    yield DONE
