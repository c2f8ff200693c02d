"""From one HTTP request to the engine's streams and back: submit, merge, collect, count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from loramux.engine.interface import Engine, Stream
from loramux.errors import EngineStopped, LoramuxError
from loramux.server.errors import DeadlineExceeded, GenerationFailed
from loramux.server.limits import Account
from loramux.server.metrics import Timer
from loramux.types import Delta, EngineRequest, FinishReason, TokenLogprobs, Waited

PromptLogprobs = Sequence[TokenLogprobs | None]


@dataclass(slots=True)
class Part:
    """A stretch of one choice: what one step added to it, or all of it."""

    index: int
    """Number of the choice: ``prompt * n + i``."""
    prompt: int
    """Number of the prompt it answers."""
    first: bool
    """The choice begins here."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    """With a choice's first part, where the request asked for them."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    embedding: bytes | None = None
    """As in ``Delta``."""

    def extend(self, other: Part) -> None:
        """Append a later part of the same choice."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one HTTP request. A prompt counts once, whatever ``n`` is."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Those of the prompts that were found in the prefix cache."""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens

    def as_json(self) -> dict[str, Any]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer:
    """All choices, or embeddings, of one HTTP request; each prompt is one request of the engine.

    Its owner must call ``abort`` (or leave the ``with`` block) once the answer is no longer wanted,
    finished or not. Its tokens are charged to ``account`` as they are made.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        n: int,
        num_prompt_tokens: int,
        timer: Timer,
        seconds: float,
        deadline: float,
        interval: float,
        account: Account,
    ) -> None:
        """As ``submit`` has it; ``deadline`` is by the event loop's clock."""
        self.deadline = deadline
        self.timer = timer
        self.submitted = time.perf_counter()
        self.waited: Waited | None = None
        """Of the first sequence that has got a token."""
        self.finish_reasons: dict[int, FinishReason] = {}
        """By the number of the choice, for those that have ended."""
        self._streams = streams
        self._n = n
        self._num_prompt_tokens = num_prompt_tokens
        self._seconds = seconds
        self._interval = interval
        self._account = account
        self._num_output_tokens = 0
        self._num_cached_tokens = 0
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._begun: set[int] = set()

    @classmethod
    async def submit(
        cls,
        engine: Engine,
        requests: Sequence[EngineRequest],
        *,
        timer: Timer,
        seconds: float,
        interval: float,
        account: Account,
    ) -> Answer:
        """Submit all requests, which are of one kind, or none where the engine refuses one of them.

        ``seconds``: until the answer must be complete. ``interval``: seconds between parts, but for
        the first and the last. Raises what ``Engine.submit`` does, and KeyLimitReached where the
        prompts' tokens are too many for ``account`` at this time.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        # Before they are submitted: other requests of the same key run in between.
        account.spend_prompt(num_prompt_tokens)
        try:
            streams = await _submit_all(engine, requests)
        except BaseException:
            account.refund(num_prompt_tokens)  # what the engine refuses costs nothing
            raise
        return cls(
            streams,
            n=requests[0].num_completions,
            num_prompt_tokens=num_prompt_tokens,
            timer=timer,
            seconds=seconds,
            deadline=deadline,
            interval=interval,
            account=account,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Free whatever still runs; harmless for what has finished."""
        for stream in self._streams:
            stream.abort()

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(self._num_prompt_tokens, self._num_output_tokens, self._num_cached_tokens)

    async def parts(self) -> AsyncIterator[Part]:
        """The parts of all choices in the order in which they are made.

        Raises GenerationFailed when a choice cannot go on, EngineStopped when the engine goes down,
        DeadlineExceeded when the time is over.
        """
        try:
            merged = _merge(self._streams, self.deadline, self._interval, self._account)
            async with aclosing(merged) as batches:
                async for batch in batches:
                    for part in self._joined(batch):
                        self.timer.tokens(part.index, len(part.token_ids))
                        yield part
        except TimeoutError:
            raise DeadlineExceeded(
                f"the answer was not complete after {self._seconds:g} seconds: allow more "
                "(timeout, or the server's --max-request-seconds) or ask for fewer tokens"
            ) from None
        self.timer.finish()

    async def collect(self) -> list[Part]:
        """Every choice as one part, by index. Raises as ``parts`` does."""
        choices: dict[int, Part] = {}
        async for part in self.parts():
            if part.first:
                choices[part.index] = part
            else:
                choices[part.index].extend(part)
        return [choices[index] for index in sorted(choices)]

    def _joined(self, batch: Sequence[tuple[int, Delta]]) -> Iterator[Part]:
        """One part for each choice in a batch. Raises as ``parts`` does, after what came before."""
        parts: dict[int, Part] = {}
        try:
            for prompt, delta in batch:
                part = self._part(prompt, delta)
                if part.index in parts:
                    parts[part.index].extend(part)
                else:
                    parts[part.index] = part
        except LoramuxError:
            yield from parts.values()
            raise
        yield from parts.values()

    def _part(self, prompt: int, delta: Delta) -> Part:
        if delta.error is not None or delta.finish_reason == "error":
            raise GenerationFailed(delta.error or "the request failed")
        if delta.finish_reason == "abort":
            raise EngineStopped("the request was aborted by the server: send it again")
        index = prompt * self._n + delta.index
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        first = index not in self._begun
        self._begun.add(index)
        self._num_output_tokens += len(delta.token_ids)
        self.waited = self.waited or delta.waited
        if delta.finish_reason is not None:
            self.finish_reasons[index] = delta.finish_reason
        if delta.index == 0:
            self._num_cached_tokens += delta.cached_tokens
        return Part(
            index,
            prompt,
            first,
            delta.text,
            list(delta.token_ids),
            list(delta.logprobs),
            self._prompt_logprobs.get(prompt) if first else None,
            delta.finish_reason,
            delta.stop_reason,
            delta.embedding,
        )


async def _submit_all(engine: Engine, requests: Sequence[EngineRequest]) -> list[Stream]:
    """The streams of all requests; if one cannot be submitted, none goes on and its error is
    raised."""
    tasks = [asyncio.create_task(engine.submit(request)) for request in requests]
    try:
        return [await task for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome.abort()
        raise


class _Arrivals:
    """What several streams bring, handed out in batches.

    The first one comes at once and the end, too; others at least ``interval`` seconds after the one
    before, so that many streams cost as many events as somebody can read, not one for each token.
    Who falls behind has fewer and larger batches, and catches up.
    """

    def __init__(self, deadline: float, interval: float) -> None:
        """``deadline``: by the event loop's clock."""
        self._loop = asyncio.get_running_loop()
        self._interval = interval
        self._items: list[tuple[int, Delta] | Exception | None] = []
        self._ready = asyncio.Event()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # One timer for all: a timeout for each item would cost as much as the item.
        self._deadline = self._loop.call_at(deadline, self.end, TimeoutError())

    def add(self, item: tuple[int, Delta]) -> None:
        self._items.append(item)
        if self._loop.time() >= self._next_at:
            self._ready.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._next_at, self._ready.set)

    def end(self, failure: Exception | None = None) -> None:
        """One of the streams has ended."""
        self._items.append(failure)
        self._ready.set()

    async def take(self) -> list[tuple[int, Delta] | Exception | None]:
        """The next batch, in order; None and exceptions are ends of streams."""
        await self._ready.wait()
        self._ready.clear()
        self._cancel_timer()
        self._next_at = self._loop.time() + self._interval
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        self._deadline.cancel()
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _merge(
    streams: Sequence[Stream], deadline: float, interval: float, account: Account
) -> AsyncGenerator[list[tuple[int, Delta]], None]:
    """The deltas of all streams, each with its stream's number, in batches as ``_Arrivals`` says.

    Tokens are charged to ``account``. Raises TimeoutError when ``deadline`` comes before the end.
    """
    arrivals = _Arrivals(deadline, interval)

    async def pump(number: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                # Here, not where it is sent: a client that does not read pays all the same.
                account.spend(len(delta.token_ids))
                arrivals.add((number, delta))
        except Exception as error:
            arrivals.end(error)
        else:
            arrivals.end()

    pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            batch: list[tuple[int, Delta]] = []
            failure: Exception | None = None
            for item in await arrivals.take():
                if isinstance(item, tuple):
                    batch.append(item)
                elif item is None:
                    num_open -= 1
                else:
                    failure = item
                    break
            if batch:
                yield batch
            if failure is not None:
                raise failure
    finally:
        arrivals.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
