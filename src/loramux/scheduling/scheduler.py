"""Which sequences take part in the next step, with how many tokens and which blocks and slots."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import takewhile

from loramux.adapters.residency import Residency
from loramux.plan import SequenceStep, SlotOrder, StepPlan
from loramux.scheduling.blocks import BlockAllocator
from loramux.scheduling.drains import Drains
from loramux.scheduling.fair_shares import FairShares
from loramux.scheduling.load_budget import LoadBudget
from loramux.scheduling.request import Request, Turn
from loramux.scheduling.sequence_blocks import SequenceBlocks
from loramux.scheduling.slot_use import SlotUse
from loramux.scheduling.steps import Limits, Step, sequence_step
from loramux.scheduling.tally import Tally
from loramux.types import AdapterId, RequestId, Slot, Waited


class Scheduler:
    """Continuous batching: running requests first, then waiting ones, each in turn.

    A request's turn is its priority, the lowest number first, then its place by the shares of the
    adapters, where these have any (``FairShares``), and then its arrival; it stays.
    Every running request gets a token of the budget; a long prompt is read in chunks of what the
    others leave. When blocks run out, the running request with the last turn is preempted: it loses
    its blocks, waits in its old place and is recomputed later, but for what it finds still there
    (``SequenceBlocks``). Nobody is preempted for the sake of a later turn, so no two preempt each
    other. The running request with the first turn always goes on, because one sequence of the
    greatest length fits into the cache (``fits``); so every request ends, unless there is no end of
    more urgent ones. A request that waits preempts nobody, however urgent it is.

    A request whose adapter has no slot is passed by others, for a bounded time (``Drains``). Where
    many adapters come at once, they come one or a few a step, and a large one ahead of its
    requests, which start when it is there (``LoadBudget``).

    A step may be scheduled while the one before it runs. Its sequences then go on with a token that
    is not known yet (``PENDING_TOKEN``), and those that this token ends for lack of room take no
    part. Blocks and slots that the running step reads are given away without waiting for it,
    because the next step comes after it on the device. That also holds for the row of a request
    that has ended meanwhile: what it writes, into blocks that were its own at its launch, comes
    before anything that a new owner writes.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockAllocator,
        residency: Residency,
        *,
        drains: Drains,
        shares: FairShares | None = None,
        forbidden_tokens: Callable[[Request], tuple[int, ...]] = lambda request: (),
        has_arrived: Callable[[Slot], bool] = lambda slot: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``forbidden_tokens``: those that a request with ``min_tokens`` may not choose next;
        ``has_arrived``: whether what was last ordered into a slot is there."""
        assert limits.max_num_seqs <= limits.max_step_tokens, "each sequence needs a token a step"
        self._limits = limits
        self._blocks = SequenceBlocks(blocks, limits.block_size)
        self._slots = SlotUse(residency, drains, has_arrived)
        self._shares = shares
        self._forbidden_tokens = forbidden_tokens
        self._clock = clock
        self._waiting: list[Request] = []  # both lists in order of their turns
        self._running: list[Request] = []
        self._ending: list[Request] = []  # only the result of a launched step is left to come
        self._num_arrived = 0
        self._by_id: dict[RequestId, Request] = {}
        self.num_preemptions = 0
        self.queue_waits = Tally()
        """Of all sequences, up to their first start."""
        self.slot_waits = Tally()
        """Of sequences with an adapter, up to their first start."""

    @property
    def num_drains(self) -> int:
        """Adapters in use that were made to give up their slots."""
        return self._slots.num_drains

    @property
    def num_prefix_tokens_asked(self) -> int:
        """Prompt tokens that were looked for in known blocks."""
        return self._blocks.num_asked

    @property
    def num_prefix_tokens_found(self) -> int:
        """Those that were found, and not computed."""
        return self._blocks.num_found

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running_adapters(self) -> set[AdapterId]:
        """Adapters in the running batch; for any thread."""
        return self._slots.running()

    def waiting_adapters(self) -> dict[AdapterId, int]:
        """Adapters with sequences that wait, and the priority of the most urgent of each; for any
        thread."""
        waiting = list(self._waiting)  # in one go, as the engine's thread may change it
        # Of each adapter the first one counts, which comes last here.
        return {r.adapter_id: r.priority for r in reversed(waiting) if r.adapter_id is not None}

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def requests(self) -> Iterator[Request]:
        """All requests that are not finished."""
        return iter(list(self._by_id.values()))

    def holds(self, request: Request) -> bool:
        """Whether a request has not been removed, whoever has its id by now."""
        return self._by_id.get(request.request_id) is request

    def fits(self, num_tokens: int) -> bool:
        """Whether one sequence of this length fits into the KV cache."""
        return self._blocks.fits(num_tokens)

    def add(self, request: Request) -> None:
        """Queue a request that has at least one token and whose adapter the residency knows."""
        assert request.request_id not in self._by_id, "a request id is used twice"
        assert request.tokens, "an empty prompt has nothing to compute"
        # The last token's keys and values are never computed.
        assert self.fits(request.max_total_tokens - 1), "admission must refuse what cannot fit"
        self._by_id[request.request_id] = request
        request.turn = (request.priority, self._virtual_start(request), self._num_arrived)
        request.queued_at = self._clock()
        self._num_arrived += 1
        if not self._slots.has_copy(request.adapter_id):
            request.note_without_slot(request.queued_at)  # it may be that no step can be made
        insort(self._waiting, request, key=_turn)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request, whether it runs, waits or is about to end."""
        del self._by_id[request.request_id]
        if request.running:
            self._stop_running(request)
        elif request in self._ending:
            self._ending.remove(request)
        else:
            self._waiting.remove(request)
            self._note_first_waiting(request.adapter_id)
        if self._shares is not None:
            self._shares.leave(request.request_id, request.num_used)

    def distrust(self, request: Request) -> None:
        """A request's logits are not finite: nobody shall find its keys and values.

        It may have been removed already, and its blocks be others'.
        """
        self._blocks.distrust(request)

    @property
    def can_step(self) -> bool:
        """Whether a request could take part in a step; others wait for copies of their adapters."""
        return bool(self._running) or any(map(self._has_copy, self._waiting))

    def wanted_copies(self) -> list[AdapterId]:
        """Adapters without a copy in host memory that requests wait for, in their order."""
        wanted = dict.fromkeys(r.adapter_id for r in self._waiting)
        return [a for a in wanted if a is not None and self._slots.lacks_copy(a)]

    def keep_copies_from(self, adapter_id: AdapterId) -> set[AdapterId]:
        """Whose copies must stay for what an adapter needs: of those that run, and of those that
        wait, unless it has waited too long itself and for longer."""
        return self._slots.keep_copies_from(adapter_id, self.waiting_adapters())

    def note_fetch(self, adapter_id: AdapterId) -> None:
        """An adapter's copy is on its way now, and its slot is not needed before it is there."""
        self._slots.pause(adapter_id)

    def requests_of(self, adapter_id: AdapterId) -> list[Request]:
        """The waiting requests of an adapter."""
        return [r for r in self._waiting if r.adapter_id == adapter_id]

    def schedule(self) -> Step | None:
        """The next step, or None when nobody can take part in one. It must be launched."""
        self._retire()
        self._slots.note_arrivals()
        self._preempt_drained()
        budget = self._limits.max_step_tokens - len(self._running)
        chosen: list[tuple[Request, int]] = []
        for request in list(self._running):
            if not request.running:
                continue  # preempted in favour of another one of this same step
            count = min(request.num_uncomputed, 1 + budget)
            if self._grow_or_preempt(request, count):
                chosen.append((request, count))
                budget -= count - 1
        orders: list[SlotOrder] = []
        # Who was preempted just now needs more blocks than that has left, and starts again only
        # where others have computed some of them meanwhile.
        self._admit(budget, chosen, orders)
        if not chosen:
            return None
        chosen.sort(key=lambda item: item[0].turn)
        if all(request.adapter_id is not None for request, _ in chosen):
            # Rows of one slot side by side spare the LoRA ops a gather. Not beside base rows: where
            # a row stands in a matrix product can change its last bits, and whether its neighbours
            # have adapters must not change that.
            chosen.sort(key=lambda item: self._slots.slot_of(item[0].adapter_id))
        plan = StepPlan(tuple(orders), tuple(self._part_of(r, n) for r, n in chosen))
        for request, count in chosen:
            request.num_computed += count
            # What comes out of its last token is on its way.
            request.num_in_flight += request.num_uncomputed == 0
        return Step(plan, tuple(request for request, _ in chosen))

    def check(self) -> None:
        """Assert that the queues, blocks and slots agree."""
        self._blocks.check(self._by_id.values())
        queued = [*self._waiting, *self._running, *self._ending]
        assert set(self._by_id.values()) == set(queued)
        assert len(self._by_id) == len(queued)
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_turn), "the order of turns is lost"
        for request in (*self._waiting, *self._ending):
            assert not request.running
            assert not request.blocks
            assert request.num_computed == 0
        for request in self._running:
            assert request.running
            assert 0 < request.num_computed < request.num_tokens <= request.max_total_tokens
            assert self._blocks.count(request.num_computed) == len(request.blocks)
        running = Counter(r.adapter_id for r in self._running if r.adapter_id is not None)
        self._slots.check(running, self.waiting_adapters(), self._in_use_before)
        if self._shares is not None:
            started = {r.request_id: r.waited is not None for r in self._by_id.values()}
            self._shares.check(started)

    def _virtual_start(self, request: Request) -> int:
        if self._shares is None:
            return 0
        return self._shares.enter(
            request.request_id,
            request.adapter,
            priority=request.priority,
            cost=request.max_total_tokens,
        )

    def _retire(self) -> None:
        """Take blocks, slots and places from those that certainly end with a token in flight."""
        for request in [r for r in self._running if r.ends_in_flight]:
            self._stop_running(request)
            self._ending.append(request)

    def _preempt_drained(self) -> None:
        """End drains that take too long; the requests start again when their adapter has a slot.

        Each has got a token first: adapters that take turns in one slot all come to an end.
        """
        overdue = self._slots.overdue()
        for request in [r for r in self._running if r.adapter_id in overdue]:
            if request.has_gained:
                self._preempt(request)

    def _note_first_waiting(self, adapter_id: AdapterId | None) -> None:
        """An adapter waits for a slot only while a request of it does, and with its priority."""
        if adapter_id is None:
            return
        first = next((r for r in self._waiting if r.adapter_id == adapter_id), None)
        if first is None:
            self._slots.end_wait(adapter_id)
        else:
            self._slots.note_priority(adapter_id, first.priority)

    def _in_use_before(self, priority: int) -> set[AdapterId]:
        """Adapters with running requests that are more urgent than a priority."""
        earlier = takewhile(lambda request: request.priority < priority, self._running)
        return {r.adapter_id for r in earlier if r.adapter_id is not None}

    def _has_copy(self, request: Request) -> bool:
        return self._slots.has_copy(request.adapter_id)

    def _grow_or_preempt(self, request: Request, count: int) -> bool:
        """Find blocks for ``count`` more tokens, at the cost of requests with later turns."""
        while not self._blocks.grow(request, count):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._stop_running(request)
        request.num_preemptions += 1
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()  # reported again, from the start
        insort(self._waiting, request, key=_turn)
        self.num_preemptions += 1

    def _stop_running(self, request: Request) -> None:
        self._running.remove(request)
        request.running = False
        request.most_computed = max(request.most_computed, request.num_computed)
        self._blocks.release(request)
        self._slots.leave(request.adapter_id)

    def _admit(
        self, budget: int, chosen: list[tuple[Request, int]], orders: list[SlotOrder]
    ) -> None:
        """Start waiting requests in order; one whose adapter has no slot is passed by others."""
        without_slot: set[AdapterId | None] = set()
        loads = LoadBudget(
            self._limits.max_load_bytes,
            anyone_waits=bool(self._running),
            any_under_way=self._slots.any_arriving,
        )
        now = self._clock()
        for request in list(self._waiting):
            if not budget or len(self._running) >= self._limits.max_num_seqs:
                return
            if request.num_in_flight:
                return  # preempted just now: a prompt cannot be computed again with a token unknown
            if request.adapter_id in without_slot:
                request.note_without_slot(now)
                continue
            if not self._slots.can_have(request.adapter_id, request.priority):
                without_slot.add(request.adapter_id)
                request.note_without_slot(now)
                self._slots.wait(
                    request.adapter_id,
                    request.priority,
                    waiting=self.waiting_adapters,
                    in_use_before=self._in_use_before,
                )
                continue
            found = self._blocks.find(request)
            # Room for everything known so far, not for the first chunk alone: a request that
            # starts and is preempted in the middle of its prompt has wasted the work.
            if not self._blocks.has_room(request, found):
                return
            ahead = self._slots.bring_ahead(request.adapter_id, loads)
            if ahead is not None:
                orders.extend(ahead)
                without_slot.add(request.adapter_id)
                request.note_without_slot(now)
                continue
            orders.extend(self._slots.take(request.adapter_id, request.priority))
            if not request.num_preemptions:
                self._note_first_start(request, now)
            self._blocks.start(request, found)
            count = min(request.num_uncomputed, budget)
            grown = self._blocks.grow(request, count)
            assert grown, "the blocks were counted a moment ago"
            self._waiting.remove(request)
            insort(self._running, request, key=_turn)
            request.running = True
            request.num_at_start = request.num_tokens
            chosen.append((request, count))
            budget -= count

    def _part_of(self, request: Request, count: int) -> SequenceStep:
        slot = self._slots.slot_of(request.adapter_id)
        return sequence_step(request, count, slot, self._forbidden_tokens)

    def _note_first_start(self, request: Request, now: float) -> None:
        since = request.without_slot_since
        without_slot = 0.0 if since is None else now - since
        request.waited = Waited(now - request.queued_at, without_slot)
        self.queue_waits.observe(request.waited.queue_seconds)
        if self._shares is not None:
            self._shares.note_start(request.request_id)
        if request.adapter_id is not None:
            self.slot_waits.observe(without_slot)


def _turn(request: Request) -> Turn:
    return request.turn
