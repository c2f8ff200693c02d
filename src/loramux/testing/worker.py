"""A worker without a model: its tokens are right only if every order it was given was right."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from loramux.adapters.spec import PreparedAdapter
from loramux.errors import AdapterRefused
from loramux.plan import (
    PENDING_TOKEN,
    SequenceResult,
    SequenceStep,
    SlotLoad,
    SlotOrder,
    StepPlan,
    StepResult,
)
from loramux.types import AdapterId, Pooling, RequestId, Slot, TokenLogprobs

VOCAB_SIZE = 100


@dataclass(frozen=True, slots=True)
class _Cell:
    """What one place of the fake KV cache holds, as the step that wrote it saw it."""

    token_id: int
    position: int
    adapter_id: AdapterId | None
    step: int

    @property
    def content(self) -> _Content:
        return self.token_id, self.position, self.adapter_id


_Content = tuple[int, int, AdapterId | None]
"""Token, position and adapter of one place of a context."""


def expected_tokens(
    adapter_id: str | None,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int | None = None,
    min_tokens: int = 0,
    ends: Collection[int] = (),
) -> list[int]:
    """The ``count`` tokens that follow a prompt when nothing goes wrong on the way.

    ``seed`` is the sequence's own (request's plus index), None for greedy; the first
    ``min_tokens`` tokens avoid ``ends``.
    """
    tokens = list(prompt)
    for place in range(count):
        forbidden = ends if place < min_tokens else ()
        tokens.append(_next_token(_true_context(adapter_id, tokens), adapter_id, seed, forbidden))
    return tokens[len(prompt) :]


def expected_prompt_logprobs(
    adapter_id: str | None, prompt: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """The log-probabilities of all prompt tokens but the first."""
    context = _true_context(adapter_id, prompt)
    return [_logprob(context[:end], prompt[end], top) for end in range(1, len(prompt))]


def expected_embedding(
    adapter_id: str | None,
    prompt: Sequence[int],
    *,
    pooling: Pooling = "last",
    normalize: bool = True,
) -> list[float]:
    """The vector of a prompt, up to rounding."""
    context = _true_context(adapter_id, prompt)
    first = 0 if pooling == "mean" else len(prompt) - 1
    rows = [_hidden(context[: end + 1]) for end in range(first, len(prompt))]
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    length = math.hypot(*mean) if normalize else 1.0
    return [number / length for number in mean]


@dataclass(frozen=True, eq=False)
class FakeLaunchedStep:
    """Implements ``engine.interface.LaunchedStep``: ``hand_out`` takes the step and may refuse."""

    outcome: StepResult
    hand_out: Callable[[FakeLaunchedStep], StepResult]
    load_seconds: float = 0.0

    def result(self) -> StepResult:
        return self.hand_out(self)


class FakeWorker:
    """Implements ``engine.interface.Worker``.

    It believes nothing but its own books: which adapter a slot holds, and what each place of each
    KV block holds. A sequence's next token is a function of its slot's adapter and of all that its
    block table leads back to, so a wrong block table or start, a stale slot or a lost token gives
    another token than ``expected_tokens``. Orders that no worker could carry out are assertion
    errors. The sizes are those of the engine under test.

    A step is computed when it is launched, which is what a device that runs its steps in order
    comes to; ``result`` only hands it out. With ``runs_ahead`` two steps may be outstanding. A load
    is said to arrive after the launch of so many steps as ``load_steps``, its own among them.

    An adapter's id is its directory's name, which need not exist; its size is looked up in
    ``adapter_bytes`` and 1 otherwise; those in ``vocab_sizes`` have more tokens than the base; the
    directory ``bad`` is refused. From the moment ``failure``
    is set, every launch and every result raises it. A request in ``row_errors`` gets that error for
    its next token.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        arena_bytes: int,
        max_num_seqs: int,
        max_step_tokens: int,
        adapter_bytes: Mapping[str, int] | None = None,
        vocab_sizes: Mapping[str, int] | None = None,
        runs_ahead: bool = False,
        load_steps: int = 0,
    ) -> None:
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._arena_bytes = arena_bytes
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._adapter_bytes = dict(adapter_bytes or {})
        self._vocab_sizes = dict(vocab_sizes or {})
        self._load_steps = load_steps
        self._loaded_at: dict[Slot, int] = {}
        self._outstanding: deque[FakeLaunchedStep] = deque()
        self._last_tokens: dict[RequestId, int] = {}
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._generation = 0
        self._step = 0
        self.runs_ahead = runs_ahead
        self.installed: dict[AdapterId, PreparedAdapter] = {}
        self.slots: dict[Slot, AdapterId] = {}
        self.failure: Exception | None = None
        self.row_errors: dict[RequestId, str] = {}

    @property
    def num_outstanding(self) -> int:
        """Launched steps whose result has not been asked for."""
        return len(self._outstanding)

    def read_adapter(self, name: str, directory: Path) -> PreparedAdapter:
        source = directory.name
        if source == "bad":
            raise AdapterRefused(name, ["layer 7 does not exist", "bias='all' is not supported"])
        num_bytes = self._adapter_bytes.get(source, 1)
        return PreparedAdapter(
            AdapterId(source), num_bytes, 8, (), source, self._vocab_sizes.get(source)
        )

    def install(self, prepared: PreparedAdapter) -> None:
        assert prepared.adapter_id not in self.installed, "an adapter is installed twice"
        self.installed[prepared.adapter_id] = prepared

    def drop(self, adapter_id: AdapterId) -> None:
        assert adapter_id not in self.slots.values(), "a slot still holds the adapter"
        del self.installed[adapter_id]

    def apply(self, orders: Sequence[SlotOrder]) -> None:
        for order in orders:
            if isinstance(order, SlotLoad):
                self._load(order)
            else:
                assert order.slot in self.slots, "a slot is cleared that holds nothing"
                del self.slots[order.slot]

    def has_arrived(self, slot: Slot) -> bool:
        return self._step >= self._loaded_at[slot] + self._load_steps

    def use_spare_time(self) -> bool:
        assert not self.num_outstanding, "a step is on its way"
        return False

    def launch(self, plan: StepPlan) -> FakeLaunchedStep:
        most = 1 if self.runs_ahead else 0
        assert self.num_outstanding <= most, "too many steps are launched at once"
        self.apply(plan.slot_orders)
        self._check_sizes(plan)
        if self.failure is not None:
            raise self.failure
        self._step += 1
        for sequence in plan.sequences:
            _check_sample(sequence)
        sequences = [self._with_pending_token(sequence) for sequence in plan.sequences]
        for sequence in sequences:
            self._write(sequence)
        results = tuple(self._result(sequence) for sequence in sequences)
        self._last_tokens = {
            # What follows a row that has failed is read by nobody.
            result.request_id: 0 if result.token_id is None else result.token_id
            for result, sequence in zip(results, sequences, strict=True)
            if sequence.sample is not None
        }
        launched = FakeLaunchedStep(StepResult(results), self._hand_out)
        self._outstanding.append(launched)
        return launched

    def _hand_out(self, launched: FakeLaunchedStep) -> StepResult:
        if self.failure is not None:
            raise self.failure
        assert launched in self._outstanding, "a result is asked for twice"
        assert launched is self._outstanding[0], "a result is asked for out of turn"
        self._outstanding.popleft()
        return launched.outcome

    def _load(self, order: SlotLoad) -> None:
        assert 0 <= order.slot < self._num_slots, "no such slot"
        assert order.slot not in self.slots, "a slot is filled that holds an adapter"
        assert order.adapter_id not in self.slots.values(), "an adapter is loaded into two slots"
        assert order.generation > self._generation, "a generation comes twice"
        self._generation = order.generation
        self.slots[order.slot] = order.adapter_id
        self._loaded_at[order.slot] = self._step
        used = sum(self.installed[adapter_id].num_bytes for adapter_id in self.slots.values())
        assert used <= self._arena_bytes, "more bytes than the arena has"

    def _check_sizes(self, plan: StepPlan) -> None:
        sequences = plan.sequences
        assert 0 < len(sequences) <= self._max_num_seqs
        assert sum(len(s.token_ids) for s in sequences) <= self._max_step_tokens
        assert len({s.request_id for s in sequences}) == len(sequences), "a sequence comes twice"
        for s in sequences:
            assert s.token_ids, "a sequence has nothing to compute"
            assert s.start + len(s.token_ids) <= len(s.block_table) * self._block_size
            assert all(0 <= block < self._num_blocks for block in s.block_table)
            asked = 0 if s.prompt_logprobs is None else len(s.token_ids)
            assert len(s.next_prompt_tokens) <= asked
            assert len(set(s.block_table)) == len(s.block_table), "a block comes twice"
        written = [b for s in sequences for b in s.block_table[s.start // self._block_size :]]
        assert len(written) == len(set(written)), "two sequences write into one block"

    def _with_pending_token(self, sequence: SequenceStep) -> SequenceStep:
        if PENDING_TOKEN not in sequence.token_ids:
            return sequence
        assert len(sequence.token_ids) == 1, "a pending token stands beside others"
        assert sequence.request_id in self._last_tokens, "the step before samples no such token"
        return sequence._replace(token_ids=(self._last_tokens[sequence.request_id],))

    def _adapter_in(self, slot: Slot) -> AdapterId | None:
        if slot == self._num_slots:
            return None
        assert slot in self.slots, "a slot is used that holds nothing"
        return self.slots[slot]

    def _write(self, sequence: SequenceStep) -> None:
        adapter_id = self._adapter_in(sequence.slot)
        for position, token_id in enumerate(sequence.token_ids, sequence.start):
            place = self._place(sequence, position)
            old = self._cells.get(place)
            assert old is None or old.step < self._step, "two tokens are written to one place"
            self._cells[place] = _Cell(token_id, position, adapter_id, self._step)

    def _place(self, sequence: SequenceStep, position: int) -> tuple[int, int]:
        index, place = divmod(position, self._block_size)
        return sequence.block_table[index], place

    def _result(self, sequence: SequenceStep) -> SequenceResult:
        sample, adapter_id = sequence.sample, self._adapter_in(sequence.slot)
        end = sequence.end
        cells = [self._cells.get(self._place(sequence, position)) for position in range(end)]
        context = [None if cell is None else cell.content for cell in cells]
        if sequence.hidden is not None:
            if (error := self.row_errors.pop(sequence.request_id, None)) is not None:
                return SequenceResult(sequence.request_id, error=error)
            first = sequence.start if sequence.hidden == "sum" else end - 1
            rows = [_hidden(context[: place + 1]) for place in range(first, end)]
            total = [sum(column) for column in zip(*rows, strict=True)]
            return SequenceResult(sequence.request_id, hidden=struct.pack("<3f", *total))
        prompt = tuple(
            _logprob(context[: sequence.start + i + 1], token, sequence.prompt_logprobs or 0)
            for i, token in enumerate(sequence.next_prompt_tokens)
        )
        if sample is None:
            return SequenceResult(sequence.request_id, prompt_logprobs=prompt)
        known = [None if cell is None else cell.token_id for cell in cells[: len(sample.tokens)]]
        assert known == list(sample.tokens), "the sample's tokens are not those of the cache"
        if (error := self.row_errors.pop(sequence.request_id, None)) is not None:
            return SequenceResult(sequence.request_id, prompt_logprobs=prompt, error=error)
        seed = None if sample.params.greedy else sample.seed
        forbidden = (*sample.forbidden, *_not_allowed(sample.allowed))
        token = _next_token(context, adapter_id, seed, forbidden)
        top = sample.params.logprobs
        return SequenceResult(
            sequence.request_id,
            token_id=token,
            logprobs=None if top is None else _logprob(context, token, top),
            prompt_logprobs=prompt,
        )


def _check_sample(sequence: SequenceStep) -> None:
    sample, end = sequence.sample, sequence.end
    is_pending = PENDING_TOKEN in sequence.token_ids
    if sample is None:
        assert not is_pending, "a pending token is computed for nothing"
        return
    assert sequence.hidden is None, "an embedding chooses a token"
    assert sample.position == end - sample.num_prompt_tokens, "a wrong place in the output"
    assert len(sample.tokens) == end - is_pending, "tokens are missing from the sample"
    if is_pending:
        assert not sample.params.penalised, "penalties need the token that is pending"
        assert not sample.forbidden, "forbidden tokens change while a token is pending"
        assert sample.allowed is None, "what a guide allows changes while a token is pending"
        assert sequence.prompt_logprobs is None


def _true_context(adapter_id: str | None, tokens: Sequence[int]) -> list[_Content | None]:
    adapter = None if adapter_id is None else AdapterId(adapter_id)
    return [(token, position, adapter) for position, token in enumerate(tokens)]


def _next_token(
    context: Sequence[_Content | None],
    adapter_id: str | None,
    seed: int | None,
    forbidden: Collection[int],
) -> int:
    token = _hash(context, adapter_id, seed) % VOCAB_SIZE
    while token in forbidden:
        token = (token + 1) % VOCAB_SIZE
    return token


def _not_allowed(allowed: bytes | None) -> list[int]:
    """What a guide leaves out of the vocabulary."""
    if allowed is None:
        return []
    mask = int.from_bytes(allowed, "little")
    return [token for token in range(VOCAB_SIZE) if not mask >> token & 1]


def _logprob(context: Sequence[_Content | None], token: int, top: int) -> TokenLogprobs:
    logprob = -(_hash(context, token) % 4096) / 256
    return TokenLogprobs(token, logprob, tuple((token + i, logprob - i) for i in range(top)))


def _hidden(context: Sequence[_Content | None]) -> tuple[int, int, int]:
    """The hidden state of the last place: numbers whose sums are exact in 32 bits."""
    found = _hash(context, "hidden")
    return 1 + found % 251, found // 251 % 251 - 125, found // 251**2 % 251 - 125


def _hash(*values: object) -> int:
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "big")
