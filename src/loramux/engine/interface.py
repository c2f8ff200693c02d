"""The two faces of an engine: what servers need of it, and what it needs of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from loramux.adapters.spec import PreparedAdapter
from loramux.guide import Grammar, Guide
from loramux.plan import SlotOrder, StepPlan, StepResult
from loramux.stats import EngineStats
from loramux.types import (
    AdapterId,
    AdapterInfo,
    Delta,
    EngineRequest,
    RequestId,
    Slot,
    SourceRules,
)


class LaunchedStep(Protocol):
    """A step that the device runs, has run or will run."""

    @property
    def load_seconds(self) -> float:
        """What the plan's slot orders took of the thread that launched it."""
        ...

    def result(self) -> StepResult:
        """Wait for the step; results stand in the order of the plan's sequences.

        Called once for each step, in the order of their launches; for none after a step has failed.
        """
        ...


class Worker(Protocol):
    """Carries out an engine's orders. ``testing.FakeWorker`` is one without a model.

    What a worker does on its device comes out as if done in the order of the calls. So whatever a
    launched step reads (KV blocks, a slot's weights) may be given away at once: the new owner
    writes after it.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether it pays to launch a step before the result of the one before is known."""
        ...

    def read_adapter(self, name: str, directory: Path) -> PreparedAdapter:
        """Read and check an adapter; the one method for any thread. Raises AdapterError."""
        ...

    def install(self, prepared: PreparedAdapter) -> None:
        """Keep an adapter's weights, ready for a slot."""
        ...

    def drop(self, adapter_id: AdapterId) -> None:
        """Free the weights of an adapter that has no slot any more."""
        ...

    def apply(self, orders: Sequence[SlotOrder]) -> None:
        """Carry out slot orders outside a step."""
        ...

    def has_arrived(self, slot: Slot) -> bool:
        """Whether a slot's weights are there, so that a step with them would not wait."""
        ...

    def use_spare_time(self) -> bool:
        """Do a part of what later steps would be slower without, at most a few tenths of a second;
        False when nothing is left. Only while no step is on its way."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one step; at most one other, the one before it, has not handed out its result."""
        ...


class Stream(Protocol):
    """The answer to one request while it is made.

    Iterating yields deltas of all its completions until each has a finish reason. ``abort`` may be
    called at any time and more than once; leaving the iteration early does not abort by itself.
    """

    request_id: RequestId

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def abort(self) -> None: ...


class TextCodec(Protocol):
    """Text to tokens and back, by one tokenizer. Can be pickled, to be used in another process."""

    @property
    def key(self) -> str:
        """The same for codecs that do the same; tokens of another one mean something else."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with the special tokens that the tokenizer adds by itself."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Tokens of a conversation that ends where the assistant speaks.

        ``tools`` are OpenAI's objects, and ``arguments`` of calls in messages are objects, too.
        Raises InvalidRequest when the model has no chat template, or the template refuses or has
        no place for what there is of tools.
        """
        ...

    @property
    def tool_template(self) -> str:
        """The literal text in the chat template for conversations with tools; "" without one."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that stand beside the vocabulary of text, by how they read."""
        ...

    @property
    def special_tokens(self) -> Collection[str]:
        """Those of them that texts leave out."""
        ...


class Detokenizer(Protocol):
    """Text of one completion, token by token, in whole characters."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """What is still held back."""
        ...


class EngineText(TextCodec, Protocol):
    """A codec that can also follow a completion, and guide it."""

    def detokenizer(
        self, *, skip_special_tokens: bool = True, kept: Collection[str] = ()
    ) -> Detokenizer:
        """``kept`` are special tokens, as they read, that are not skipped with the others."""
        ...

    def compile(self, guide: Guide) -> Grammar:
        """A guide made ready, which may take a second; for any thread.

        Raises InvalidRequest for one that cannot be followed, MissingPackage without llguidance.
        """
        ...

    def warm_up(self) -> None:
        """Do now what the first guide, and steps beside it, would have to wait for."""
        ...


class EngineCalls(Protocol):
    """What can be asked of an engine beside answers, from one event loop."""

    @property
    def base_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    async def text_of(self, model: str | None) -> TextCodec:
        """The codec of a model: an adapter with more tokens than the base may have its own.

        Give its key along with the tokens that it has made: the name may come to mean another
        adapter before they are submitted. Raises UnknownModel, or AdapterError where an adapter's
        tokenizer cannot be read.
        """
        ...

    async def load_adapter(
        self,
        name: str,
        source: str,
        *,
        load_inplace: bool = False,
        pinned: bool = False,
        rules: SourceRules | None = None,
    ) -> AdapterInfo:
        """Read, check and register an adapter without delaying a step. Raises AdapterError.

        ``rules`` bind a source that somebody else than the operator has named.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Take no new requests for the name; running ones finish. Raises UnknownAdapter."""
        ...

    async def pin_adapter(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Let an adapter keep its slot while it is idle, or no longer.

        Raises UnknownAdapter, or AdapterRefused where others would have no slot left.
        """
        ...

    async def adapters(self) -> list[AdapterInfo]: ...

    async def stats(self) -> EngineStats: ...


class Engine(EngineCalls, Protocol):
    """Runs requests; ``AsyncEngine`` is one, ``testing.FakeEngine`` another.

    All methods are called from one event loop. Once the engine is down they raise EngineStopped,
    but for ``adapters`` and ``stats``, which tell what was known last.
    """

    async def submit(self, request: EngineRequest) -> Stream:
        """Queue a request. Raises RequestError (UnknownModel, InvalidRequest, AdapterReplaced) at
        once, so that a server can answer with a status before it starts a stream; MissingPackage
        for a guide without llguidance; EngineStopped when it is down.
        """
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine has died, or None while it lives."""
        ...


class Listener(Protocol):
    """Hears what an engine's service has to say, in the event loop that has started it."""

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """What one step or command gave rise to."""
        ...

    def end(self, failure: str) -> None:
        """The service has ended, with the reason; nothing follows."""
        ...


class Service(EngineCalls, Protocol):
    """An engine below its streams: in this process (``EngineService``) or in another one.

    After the end calls raise EngineStopped.
    """

    async def start(self, listener: Listener) -> None:
        """Get ready for requests. Raises LoramuxError, and has ended then."""
        ...

    async def stop(self) -> None:
        """End all requests with the reason ``abort``, then the service."""
        ...

    async def submit(self, request: EngineRequest) -> None:
        """Queue a request that has an id. Raises as ``Engine.submit`` does."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is; nothing happens if it has ended."""
        ...
