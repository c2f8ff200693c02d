"""The engine without threads: one step is schedule, execute, commit."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loramux.adapters.catalog import Catalog
from loramux.adapters.residency import Residency
from loramux.engine.adapters import AdapterDesk
from loramux.engine.answer import Answer
from loramux.engine.interface import EngineText, Worker
from loramux.errors import EngineStopped
from loramux.plan import SequenceResult
from loramux.scheduling.blocks import BlockAllocator
from loramux.scheduling.request import Request
from loramux.scheduling.scheduler import Limits, Scheduler, Step
from loramux.types import Delta, EngineStats, RequestId


@dataclass(slots=True)
class _Counters:
    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    last_step_adapters: int = 0
    max_step_adapters: int = 0
    step_seconds: float = 0.0


class EngineCore:
    """Owns the requests and the adapters' places; tells one worker what to do. Single-threaded."""

    def __init__(
        self,
        worker: Worker,
        text: EngineText,
        catalog: Catalog,
        *,
        limits: Limits,
        num_blocks: int,
        num_slots: int,
        arena_bytes: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self._worker = worker
        self._text = text
        self._eos_token_ids = frozenset(eos_token_ids)
        self._blocks = BlockAllocator(num_blocks)
        self._residency = Residency(num_slots, arena_bytes)
        self.adapters = AdapterDesk(catalog, self._residency, worker)
        self._answers: dict[RequestId, Answer] = {}
        self._scheduler = Scheduler(
            limits,
            self._blocks,
            self._residency,
            forbidden_tokens=lambda request: self._answers[request.request_id].forbidden_tokens(),
        )
        self._counters = _Counters()
        self._failure: str | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def check_alive(self) -> None:
        """Raise EngineStopped if a step has failed."""
        if self._failure is not None:
            raise EngineStopped(f"the engine has failed ({self._failure}): make a new one")

    def add(self, requests: Sequence[Request]) -> None:
        """Queue admitted sequences whose adapter is installed."""
        for request in requests:
            detokenizer = self._text.detokenizer(
                skip_special_tokens=request.params.skip_special_tokens
            )
            self._answers[request.request_id] = Answer(request, detokenizer, self._eos_token_ids)
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
        """Run one step; the new tokens of all requests in it. Empty when there is no work.

        After any exception the engine is dead: EngineStopped is raised from then on.
        """
        self.check_alive()
        try:
            return self._step()
        except BaseException as error:
            # The worker may have carried out half of its orders; going on could give an adapter's
            # requests the weights of another.
            self._failure = f"{type(error).__name__}: {error}"
            raise

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
            preemptions=self._scheduler.num_preemptions,
            slot_loads=self._residency.num_loads,
            slot_evictions=self._residency.num_evictions,
            requests_finished=counters.finished,
            requests_aborted=counters.aborted,
            adapter_bytes=self._residency.used_bytes,
            last_step_adapters=counters.last_step_adapters,
            max_step_adapters=counters.max_step_adapters,
            step_seconds=counters.step_seconds,
        )

    def check(self) -> None:
        """Assert that scheduler, blocks, slots and answers agree."""
        self._scheduler.check()
        assert {r.request_id for r in self._scheduler.requests()} == self._answers.keys()
        self.adapters.check()

    def _step(self) -> list[Delta]:
        started = time.perf_counter()
        step = self._scheduler.schedule()
        if step is None:
            assert not self.has_work, "requests wait that can never run"
            return []
        result = self._worker.execute(step.plan)
        deltas = self._commit(step, result.sequences)
        self._count(step, time.perf_counter() - started)
        return deltas

    def _commit(self, step: Step, results: Sequence[SequenceResult]) -> list[Delta]:
        deltas: list[Delta] = []
        for request, part, result in zip(step.requests, step.plan.sequences, results, strict=True):
            assert request.request_id == result.request_id, "results must keep the plan's order"
            request.num_computed += len(part.token_ids)
            request.prompt_logprobs.extend(result.prompt_logprobs)
            answer = self._answers[request.request_id]
            if result.error is not None:
                delta = answer.fail(result.error)
            elif part.sample is None:
                continue
            else:
                assert result.token_id is not None, "a sample has neither token nor error"
                request.tokens.append(result.token_id)
                delta = answer.push(result)
                self._counters.output_tokens += 1
            if delta.finish_reason is not None:
                self._finish(request)
                self._counters.finished += 1
            deltas.append(delta)
        return deltas

    def _finish(self, request: Request) -> None:
        self._scheduler.remove(request)
        del self._answers[request.request_id]
        self.adapters.release(request.adapter_id)

    def _count(self, step: Step, seconds: float) -> None:
        counters = self._counters
        adapters = {r.adapter_id for r in step.requests if r.adapter_id is not None}
        counters.num_steps += 1
        counters.step_seconds += seconds
        counters.last_step_adapters = len(adapters)
        counters.max_step_adapters = max(counters.max_step_adapters, len(adapters))
        for request, part in zip(step.requests, step.plan.sequences, strict=True):
            end = part.start + len(part.token_ids)
            counters.prompt_tokens += max(0, min(end, request.num_prompt_tokens) - part.start)
