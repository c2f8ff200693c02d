"""The engine without threads: one step is schedule, launch, wait, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from loramux.adapter_weights import AdapterWeights
from loramux.adapters.catalog import Catalog
from loramux.adapters.residency import Residency
from loramux.engine.adapters import AdapterDesk, IncomingAdapter
from loramux.engine.answer import Answer
from loramux.engine.embedding import Embedding
from loramux.engine.interface import LaunchedStep, Worker
from loramux.engine.languages import Languages
from loramux.engine.origins import Origin
from loramux.engine.pool_watch import PoolWatch
from loramux.errors import EngineStopped
from loramux.plan import SequenceResult, SequenceStep, SlotLoad
from loramux.scheduling.blocks import BlockAllocator
from loramux.scheduling.drains import Drains
from loramux.scheduling.fair_shares import FairShares
from loramux.scheduling.request import Request
from loramux.scheduling.scheduler import Scheduler
from loramux.scheduling.steps import Limits, Step
from loramux.scheduling.tally import ADAPTERS, SEQUENCES, STEP_SECONDS, Tally
from loramux.stats import EngineStats
from loramux.types import AdapterInfo, Delta, PoolingParams, RequestId, SourceRules


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that has been launched and not committed."""

    step: Step
    launched: LaunchedStep
    began: float


@dataclass(slots=True)
class _Counters:
    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    last_step_adapters: int = 0
    max_step_adapters: int = 0


class EngineCore:
    """Owns the requests and the adapters' places; tells one worker what to do. Single-threaded."""

    def __init__(
        self,
        worker: Worker,
        languages: Languages,
        catalog: Catalog,
        *,
        limits: Limits,
        num_blocks: int,
        num_slots: int,
        arena_bytes: int,
        host_bytes: int,
        max_host_copies: int | None = None,
        adapter_max_wait: float,
        weights: AdapterWeights | None = None,
        slot_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``adapter_max_wait``: seconds that a request waits for a slot before one is drained.

        ``weights``: of the adapters' shares, where they have any.

        ``slot_bytes``: what each slot adds to ``arena_bytes``, where these hang on the slots.
        """
        self._worker = worker
        self._languages = languages
        self._blocks = BlockAllocator(num_blocks)
        self._residency = Residency(num_slots, arena_bytes, host_bytes, max_host_copies)
        self.adapters = AdapterDesk(catalog, self._residency, worker, languages, weights)
        self._answers: dict[RequestId, Answer | Embedding] = {}
        self._scheduler = Scheduler(
            limits,
            self._blocks,
            self._residency,
            drains=Drains(adapter_max_wait, clock),
            shares=None if weights is None else FairShares(weights, catalog.has),
            forbidden_tokens=self._forbidden_tokens,
            has_arrived=worker.has_arrived,
            clock=clock,
        )
        self._watch = PoolWatch(self._residency, slot_bytes=slot_bytes, clock=clock)
        self._slot_loads = Tally()
        self._step_seconds = Tally(STEP_SECONDS)
        self._step_sequences = Tally(SEQUENCES)
        self._step_adapters = Tally(ADAPTERS)
        self._in_flight: _InFlight | None = None
        self._committed_at = 0.0
        self._counters = _Counters()
        self._failure: str | None = None

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self._scheduler.has_work

    @property
    def can_step(self) -> bool:
        """Whether ``step`` has something to do; if not, all requests wait for ``fetched``."""
        return self._in_flight is not None or self._scheduler.can_step

    def register(
        self,
        name: str,
        source: str,
        incoming: IncomingAdapter,
        *,
        pinned: bool = False,
        replace: bool = False,
        rules: SourceRules | None = None,
    ) -> AdapterInfo:
        """Give an adapter that has been read a name. Raises AdapterExists or AdapterRefused."""
        return self.adapters.register(
            name,
            source,
            incoming,
            pinned=pinned,
            replace=replace,
            in_use=self._scheduler.keep_copies_from(incoming.prepared.adapter_id),
            rules=rules,
        )

    def take_fetches(self) -> list[Origin]:
        """Adapters to be read again now, for requests that wait: the first in line first.

        Each ends in ``fetched`` or ``fetch_failed``. To be asked after whatever may change the
        queue or the room: new requests, a step, a fetch that has ended.
        """
        begun: list[Origin] = []
        for adapter_id in self._scheduler.wanted_copies():
            kept = self._scheduler.keep_copies_from(adapter_id)
            origin = self.adapters.begin_fetch(adapter_id, kept)
            if origin is not None:
                self._scheduler.note_fetch(adapter_id)
                begun.append(origin)
        return begun

    def learn(self, origin: Origin, incoming: IncomingAdapter) -> None:
        """Take an adapter that was read for its tokenizer. Raises AdapterRefused."""
        in_use = self._scheduler.keep_copies_from(origin.adapter_id)
        self.adapters.learn(origin, incoming, in_use)

    def fetched(self, origin: Origin, incoming: IncomingAdapter) -> list[Delta]:
        """Take an adapter that ``take_fetches`` asked for; deltas of requests that end by it."""
        problem = self.adapters.fetched(origin, incoming)
        return [] if problem is None else self._fail_waiting(origin, problem)

    def fetch_failed(self, origin: Origin, error: str) -> list[Delta]:
        """End the requests that wait for an adapter that cannot be read."""
        self.adapters.fetch_failed(origin, error)
        return self._fail_waiting(origin, error)

    def _fail_waiting(self, origin: Origin, error: str) -> list[Delta]:
        deltas = []
        for request in self._scheduler.requests_of(origin.adapter_id):
            deltas.append(self._answers[request.request_id].fail(error))
            self._finish(request)
            self._counters.finished += 1
        return deltas

    def check_alive(self) -> None:
        """Raise EngineStopped if a step has failed."""
        if self._failure is not None:
            raise EngineStopped(f"the engine has failed ({self._failure}): make a new one")

    def add(self, requests: Sequence[Request]) -> None:
        """Queue admitted sequences whose adapter is installed."""
        for request in requests:
            self._answers[request.request_id] = self._answer_of(request)
            if request.adapter_id is not None:
                self.adapters.note_use(request.adapter_id)
                self._watch.note_request(request.adapter_id)
            self._scheduler.add(request)

    def abort(self, parent_id: RequestId) -> list[Delta]:
        """End what is left of a request, running or waiting; its last deltas."""
        deltas = []
        for request in self._scheduler.requests():
            if request.parent_id == parent_id:
                deltas.append(self._answers[request.request_id].abort())
                self._finish(request)
                self._counters.aborted += 1
        return deltas

    def step(self) -> list[Delta]:
        """Complete one step; the new tokens of all requests in it. Empty when there is no work.

        The step after it may have been launched by then. After any exception the engine is dead:
        EngineStopped is raised from then on.
        """
        self.check_alive()
        with self._fatal():
            return self._step()

    def use_spare_time(self) -> bool:
        """Do a part of what later steps would be slower without, while there is nothing to step;
        False when nothing is left. As with ``step``, an exception ends the engine."""
        assert not self.can_step, "there is no time to spare"
        self.check_alive()
        with self._fatal():
            return self._worker.use_spare_time()

    def stats(self) -> EngineStats:
        counters = self._counters
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_blocks_used=self._blocks.num_used,
            kv_blocks_total=self._blocks.num_blocks,
            slots_used=self._residency.num_resident,
            slots_total=self._residency.num_slots,
            num_steps=counters.num_steps,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            prefix_queries=self._scheduler.num_prefix_tokens_asked,
            prefix_hits=self._scheduler.num_prefix_tokens_found,
            preemptions=self._scheduler.num_preemptions,
            slot_drains=self._scheduler.num_drains,
            slot_loads=self._residency.num_loads,
            slot_evictions=self._residency.num_evictions,
            requests_finished=counters.finished,
            requests_aborted=counters.aborted,
            adapter_bytes=self._residency.used_bytes,
            host_bytes=self._residency.host.used_bytes,
            host_adapters=len(self._residency.host),
            host_evictions=self._residency.host.num_evictions,
            last_step_adapters=counters.last_step_adapters,
            max_step_adapters=counters.max_step_adapters,
            step_seconds=self._step_seconds.histogram(),
            step_sequences=self._step_sequences.histogram(),
            step_adapters=self._step_adapters.histogram(),
            queue_seconds=self._scheduler.queue_waits.histogram(),
            found_in_slot=self._watch.found["slot"],
            found_in_host=self._watch.found["host"],
            found_in_source=self._watch.found["source"],
            host_loads=self.adapters.num_host_loads,
            read_seconds=self.adapters.reads.histogram(),
            slot_load_seconds=self._slot_loads.histogram(),
            slot_wait_seconds=self._scheduler.slot_waits.histogram(),
            running_adapters=self.adapters.names_of(self._scheduler.running_adapters()),
            waiting_adapters=self.adapters.names_of(self._scheduler.waiting_adapters()),
        )

    def check(self) -> None:
        """Assert that scheduler, blocks, slots, answers and the step in flight agree."""
        self._scheduler.check()
        assert {r.request_id for r in self._scheduler.requests()} == self._answers.keys()
        self.adapters.check()
        ending: set[Request] = set()
        if self._in_flight is not None:
            step = self._in_flight.step
            parts = zip(step.requests, step.plan.sequences, strict=True)
            ending = {
                request
                for request, part in parts
                if part.sample is not None
                or (part.hidden is not None and part.end == request.num_prompt_tokens)
            }
        for request in self._scheduler.requests():
            assert request.num_in_flight == (request in ending), "a token in flight is lost"

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """After an exception the worker may have carried out half of its orders; going on could
        give an adapter's requests the weights of another."""
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            self._in_flight = None
            raise

    def _step(self) -> list[Delta]:
        current = self._in_flight or self._launch()
        if current is None:
            fetches = self._residency.host.fetching or self._scheduler.wanted_copies()
            assert fetches or not self.has_work, "requests wait that can never run"
            return []
        # The next step first, so that the device goes on while the host waits and commits.
        self._in_flight = self._launch() if self._can_run_ahead_of(current.step) else None
        result = current.launched.result()
        deltas = self._commit(current.step, result.sequences)
        self._count(current)
        return deltas

    def _launch(self) -> _InFlight | None:
        """Schedule and start a step; None when nobody can take part in one now."""
        began = time.perf_counter()
        step = self._scheduler.schedule()
        if step is None:
            return None
        launched = self._worker.launch(step.plan)
        num_loads = sum(isinstance(order, SlotLoad) for order in step.plan.slot_orders)
        for _ in range(num_loads):
            self._slot_loads.observe(launched.load_seconds / num_loads)
        return _InFlight(step, launched, began)

    def _can_run_ahead_of(self, step: Step) -> bool:
        return self._worker.runs_ahead and not any(map(_must_be_known, step.plan.sequences))

    def _commit(self, step: Step, results: Sequence[SequenceResult]) -> list[Delta]:
        deltas: list[Delta] = []
        for request, part, result in zip(step.requests, step.plan.sequences, results, strict=True):
            assert request.request_id == result.request_id, "results must keep the plan's order"
            if result.error is not None:
                self._scheduler.distrust(request)
            if not self._scheduler.holds(request):
                continue  # it has ended since the launch, so this row was computed in vain
            request.prompt_logprobs.extend(result.prompt_logprobs)
            answer = self._answers[request.request_id]
            if result.error is not None:
                delta = answer.fail(result.error)
            elif isinstance(answer, Embedding):
                delta = answer.push(result, start=part.start, end=part.end)
                if delta is None:
                    continue
            elif part.sample is None:
                continue
            else:
                assert result.token_id is not None, "a sample has neither token nor error"
                request.land(result.token_id)
                delta = answer.push(result)
                self._counters.output_tokens += 1
            if delta.finish_reason is not None:
                self._finish(request)
                self._counters.finished += 1
            deltas.append(delta)
        return deltas

    def _answer_of(self, request: Request) -> Answer | Embedding:
        params = request.params
        if isinstance(params, PoolingParams):
            return Embedding(request, params)
        language = self._languages.of(request.adapter_id)
        detokenizer = language.text.detokenizer(
            skip_special_tokens=params.skip_special_tokens, kept=params.kept_special_tokens
        )
        return Answer(request, params, detokenizer, language.eos_token_ids)

    def _forbidden_tokens(self, request: Request) -> tuple[int, ...]:
        answer = self._answers[request.request_id]
        assert isinstance(answer, Answer), "an embedding chooses no tokens"
        return answer.forbidden_tokens()

    def _finish(self, request: Request) -> None:
        self._scheduler.remove(request)
        del self._answers[request.request_id]
        self.adapters.release(request.adapter_id)

    def _count(self, done: _InFlight) -> None:
        self._watch.look()
        step, counters, now = done.step, self._counters, time.perf_counter()
        adapters = {r.adapter_id for r in step.requests if r.adapter_id is not None}
        counters.num_steps += 1
        # Where steps overlap, each counts from the end of the one before.
        self._step_seconds.observe(now - max(done.began, self._committed_at))
        self._committed_at = now
        self._step_sequences.observe(len(step.requests))
        self._step_adapters.observe(len(adapters))
        counters.last_step_adapters = len(adapters)
        counters.max_step_adapters = max(counters.max_step_adapters, len(adapters))
        for request, part in zip(step.requests, step.plan.sequences, strict=True):
            computed = min(part.end, request.num_prompt_tokens) - part.start
            counters.prompt_tokens += max(0, computed)


def _must_be_known(part: SequenceStep) -> bool:
    """Whether what a sequence does in the next step hangs on the result of this one."""
    if part.prompt_logprobs is not None:
        return True  # how many have been reported decides which ones are asked for
    sample = part.sample
    if sample is None:
        return False
    # Penalties look at every token of the output, and what is forbidden or allowed changes with it.
    return sample.params.penalised or bool(sample.forbidden) or sample.allowed is not None
