"""Send every prompt to the base and to every adapter at once, and follow the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from loramux.demo.answers import Answer, Grid, Summary, summarise
from loramux.engine.interface import Engine, Stream
from loramux.errors import LoramuxError
from loramux.types import GenerationRequest, SamplingParams


async def answer_all(
    engine: Engine, grid: Grid, *, max_tokens: int, on_finish: Callable[[Answer], None]
) -> Summary:
    """Fill ``grid`` greedily; ``on_finish`` gets each answer when it is complete.

    A request that fails marks its own answer and leaves the others alone.
    """
    started = time.perf_counter()
    # All are submitted before the first is awaited, and all prompts are tokens before the first
    # is submitted, so that one step can hold all of them.
    requests = [(answer, await _request(engine, answer, max_tokens)) for answer in grid.answers]
    running = [(answer, await _submit(engine, answer, request)) for answer, request in requests]
    await asyncio.gather(*(_follow(answer, stream, on_finish) for answer, stream in running))
    return summarise(grid, await engine.stats(), time.perf_counter() - started)


async def _request(engine: Engine, answer: Answer, max_tokens: int) -> GenerationRequest:
    codec = await engine.text_of(answer.model)
    return GenerationRequest(
        prompt_token_ids=codec.render_chat([{"role": "user", "content": answer.prompt}]),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        model=answer.model,
        codec=codec.key,
    )


async def _submit(engine: Engine, answer: Answer, request: GenerationRequest) -> Stream | None:
    try:
        return await engine.submit(request)
    except LoramuxError as error:
        answer.fail(str(error))
        return None


async def _follow(
    answer: Answer, stream: Stream | None, on_finish: Callable[[Answer], None]
) -> None:
    try:
        if stream is not None:
            async for delta in stream:
                answer.add(delta)
    except LoramuxError as error:
        answer.fail(str(error))
    on_finish(answer)
