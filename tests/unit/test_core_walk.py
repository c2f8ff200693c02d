"""Random walks through everything that can happen to an engine between two steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loramux.errors import AdapterError, AdapterExists, AdapterRefused, UnknownAdapter
from loramux.testing import expected_embedding, expected_prompt_logprobs
from loramux.types import RequestId
from tests.unit.small_engine import Outcome, SmallEngine

EOS = (3, 50)
NAMES = ("a", "b", "c", "d")
SIZES = {"s0": 20, "s1": 20, "s2": 30, "s3": 45, "s4": 60, "s5": 101}
"""Bytes of the adapters; the device cache has 100."""


def prompt_of(start: int, length: int) -> list[int]:
    """Tokens that differ from prompt to prompt; longer ones begin with shorter ones."""
    return [(start + 7 * place) % 100 for place in range(length)]


@st.composite
def params(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.integers(1, 12))
    return {
        "n": draw(st.sampled_from((1, 1, 1, 2, 3))),
        "temperature": draw(st.sampled_from((0.0, 1.0))),
        "seed": draw(st.integers(0, 9)),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.sampled_from((0, 1, max_tokens))),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from(((), tuple(range(20, 35)), (3,)))),
        "stop": draw(st.sampled_from(((), tuple(map(chr, range(60, 70)))))),
        "include_stop_str_in_output": draw(st.booleans()),
        "logprobs": draw(st.sampled_from((None, 1))),
        "prompt_logprobs": draw(st.sampled_from((None, None, 0, 2))),
        "presence_penalty": draw(st.sampled_from((0.0, 0.0, 0.0, 1.0))),
    }


@dataclass
class Submitted:
    request_id: RequestId
    adapter_id: str | None
    prompt: list[int]
    params: dict[str, Any]
    cache_salt: str | None
    pooling: dict[str, Any] | None = None
    """Of an embedding, which has no other parameters."""
    aborted: bool = False


@dataclass
class Named:
    source: str
    pinned: bool = field(default=False)


class EngineWalk(RuleBasedStateMachine):
    """Two slots, nine blocks, six adapters: whatever can run out does."""

    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, Named] = {}
        self.submitted: list[Submitted] = []
        self.kept: set[str] = set()
        self.failed: set[str] = set()
        """Adapters that could not be fetched at some time."""

    @initialize(
        num_slots=st.integers(1, 3),
        num_blocks=st.integers(8, 12),
        max_num_seqs=st.sampled_from((4, 3, 6, 1)),
        spare_tokens=st.sampled_from((6, 20, 2)),
        max_wait=st.sampled_from((math.inf, 3.0, 0.0)),
        host_bytes=st.sampled_from((10**6, 100, 130)),
        prefix_cache=st.sampled_from((True, True, False)),
        weights=st.sampled_from((None, "*=1", "a=4,base=0.5")),
        max_load_bytes=st.sampled_from((100, 50, 25)),
        load_steps=st.sampled_from((0, 1, 4)),
    )
    def start(
        self,
        num_slots: int,
        num_blocks: int,
        max_num_seqs: int,
        spare_tokens: int,
        max_wait: float,
        host_bytes: int,
        prefix_cache: bool,
        weights: str | None,
        max_load_bytes: int,
        load_steps: int,
    ) -> None:
        self.num_slots = num_slots
        self.max_wait = max_wait
        self.engine = SmallEngine(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_num_seqs + spare_tokens,
            arena_bytes=100,
            max_model_len=32,
            eos=EOS,
            adapter_bytes=SIZES,
            runs_ahead=self.runs_ahead,
            adapter_max_wait=max_wait,
            host_bytes=host_bytes,
            prefix_cache=prefix_cache,
            weights=weights,
            max_load_bytes=max_load_bytes,
            load_steps=load_steps,
        )
        for name in NAMES[:3]:
            self.engine.load(name, f"s{NAMES.index(name)}")
            self.names[name] = Named(f"s{NAMES.index(name)}")

    @rule(data=st.data(), count=st.integers(1, 4), params=params())
    def submit(self, data: st.DataObject, count: int, params: dict[str, Any]) -> None:
        for _ in range(count):
            name, prompt, common = self.draw(data, longest=20)
            request_id = self.engine.submit(name, prompt, **common, **params)
            self.note(request_id, name, prompt, params, common)

    @rule(
        data=st.data(),
        count=st.integers(1, 4),
        pooling=st.sampled_from(("last", "mean")),
        normalize=st.booleans(),
    )
    def embed(self, data: st.DataObject, count: int, pooling: str, normalize: bool) -> None:
        asked = {"pooling": pooling, "normalize": normalize}
        for _ in range(count):
            name, prompt, common = self.draw(data, longest=32)
            request_id = self.engine.embed(name, prompt, **common, **asked)
            params = {"n": 1, "prompt_logprobs": None}
            self.note(request_id, name, prompt, params, common, asked)

    def draw(
        self, data: st.DataObject, longest: int
    ) -> tuple[str | None, list[int], dict[str, Any]]:
        """A name, a prompt, and what all requests may ask for."""
        name = data.draw(st.sampled_from((*self.names, None)))
        prompt = data.draw(st.sampled_from([[], *map(self.conversation, self.submitted[-5:])]))
        # Few beginnings, so that they come again.
        start, length = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 20))
        prompt = [*prompt, *prompt_of(start, length)][:longest]
        common = {
            "cache_salt": data.draw(st.sampled_from((None, None, "x"))),
            "priority": data.draw(st.sampled_from((0, 0, 0, -1, -2, 1))),
        }
        return name, prompt, common

    def note(
        self,
        request_id: RequestId,
        name: str | None,
        prompt: list[int],
        params: dict[str, Any],
        common: dict[str, Any],
        pooling: dict[str, Any] | None = None,
    ) -> None:
        adapter_id = None if name is None else self.names[name].source
        salt = common["cache_salt"]
        self.submitted.append(Submitted(request_id, adapter_id, prompt, params, salt, pooling))

    def conversation(self, one: Submitted, index: int = 0) -> list[int]:
        """A prompt and what has been answered so far."""
        return [*one.prompt, *self.engine.outcomes[one.request_id][index].tokens]

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.submitted))
        outcomes = self.engine.outcomes[chosen.request_id]
        ended = [outcome.finish_reason for outcome in outcomes]
        self.engine.abort(chosen.request_id)
        chosen.aborted = True
        assert [o.finish_reason for o in outcomes] == [reason or "abort" for reason in ended]

    @rule(count=st.sampled_from((1, 3, 9)))
    def step(self, count: int) -> None:
        for _ in range(count):
            # Two steps are launched at once when none is outstanding, and one whose turn is before
            # the first of the running may start with the first of them.
            first = None
            if self.engine.worker.num_outstanding or not self.runs_ahead:
                running = [s for s in self.engine.sequences if s.running]
                first = min(running, key=lambda s: s.turn, default=None)
            preemptions = first and first.num_preemptions
            deltas = self.engine.step()
            if self.max_wait == math.inf:  # else its adapter may be drained
                assert not first or first.num_preemptions == preemptions, "the first was preempted"
            ids = {(delta.request_id, delta.index) for delta in deltas}
            assert len(ids) == len(deltas)

    @precondition(lambda self: self.engine.pending)
    @rule(count=st.integers(1, 3), fails=st.sampled_from((False, False, True)))
    def fetch(self, count: int, fails: bool) -> None:
        for origin in self.engine.pending[:count]:
            if fails:
                self.failed.add(origin.adapter_id)
            self.engine.fetch(error="the source is gone" if fails else None)

    @rule(seconds=st.sampled_from((1.0, 4.0)))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(
        name=st.sampled_from(NAMES),
        source=st.sampled_from(sorted(SIZES)),
        replace=st.booleans(),
        pinned=st.sampled_from((False, False, True)),
    )
    def load(self, name: str, source: str, replace: bool, pinned: bool) -> None:
        before = self.engine.core.adapters.infos(), self.engine.catalog.held()
        taken = name in self.names and not replace
        fits = SIZES[source] + self.pinned_bytes(but=name) <= 100
        error = None
        try:
            info = self.engine.load(name, source, replace=replace, pinned=pinned)
            assert (info.adapter_id, info.pinned) == (source, pinned)
        except AdapterError as refusal:
            error = refusal
        if error is None:
            assert fits or source in before[1]
            self.names[name] = Named(source, pinned)
        else:
            assert type(error) is (AdapterExists if taken else AdapterRefused)
            assert taken or pinned or not fits
            assert (self.engine.core.adapters.infos(), self.engine.catalog.held()) == before

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        if name not in self.names:
            with pytest.raises(UnknownAdapter):
                self.engine.unload(name)
            return
        self.engine.unload(name)
        del self.names[name]

    @invariant()
    def pinned_adapters_keep_their_slots(self) -> None:
        pinned = {named.source for named in self.names.values() if named.pinned}
        resident = set(self.engine.worker.slots.values())
        assert self.kept & pinned <= resident
        self.kept = resident & pinned

    @invariant()
    def all_agree(self) -> None:
        self.engine.core.check()
        shown = {info.name: info.adapter_id for info in self.engine.core.adapters.infos()}
        assert shown == {name: named.source for name, named in self.names.items()}
        running = {s.adapter_id for s in self.engine.sequences if s.running} - {None}
        assert running <= set(self.engine.worker.slots.values())

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        self.engine.check_idle()
        for one in self.submitted[-40:]:  # the truth takes longer to find than the answer
            for index, outcome in enumerate(self.engine.outcomes[one.request_id]):
                if one.pooling is None:
                    self.check_outcome(one, index, outcome)
                else:
                    self.check_embedding(one, one.pooling, outcome)
                self.check_what_was_found(one, index, outcome)

    def check_what_was_found(self, one: Submitted, index: int, outcome: Outcome) -> None:
        """Somebody else has computed it, for the same adapter and salt."""
        found = one.prompt[: outcome.cached_tokens]
        assert not found or one.params["prompt_logprobs"] is None or len(one.prompt) == 1
        assert not found or one.pooling is None or one.pooling["pooling"] == "last"
        assert len(found) < len(one.prompt)
        others = (
            self.conversation(other, i)
            for other in self.submitted
            if (other.adapter_id, other.cache_salt) == (one.adapter_id, one.cache_salt)
            for i in range(other.params["n"])
            if (other.request_id, i) != (one.request_id, index)
        )
        assert not found or any(other[: len(found)] == found for other in others)

    def check_embedding(self, one: Submitted, pooling: dict[str, Any], outcome: Outcome) -> None:
        if outcome.finish_reason == "stop":
            expected = expected_embedding(one.adapter_id, one.prompt, **pooling)
            assert outcome.embedding == pytest.approx(expected, rel=1e-5)
        else:
            assert outcome.embedding is None
            assert one.aborted or one.adapter_id in self.failed
        assert outcome.tokens == []

    def check_outcome(self, one: Submitted, index: int, outcome: Outcome) -> None:
        expected = self.engine.expected(one.adapter_id, one.prompt, index=index, **one.params)
        if outcome.finish_reason == "abort":
            assert one.aborted
            assert outcome.tokens == expected.tokens[: len(outcome.tokens)]
        elif outcome.finish_reason == "error":
            assert one.adapter_id in self.failed
            assert outcome.tokens == expected.tokens[: len(outcome.tokens)]
        else:
            assert outcome.tokens == expected.tokens
            assert outcome.text == expected.text
            assert outcome.finish_reason == expected.finish_reason
            assert outcome.stop_reason == expected.stop_reason
        asked = one.params["prompt_logprobs"]
        if asked is None:
            assert outcome.prompt_logprobs == []
        elif outcome.tokens or outcome.prompt_logprobs:
            truth = expected_prompt_logprobs(one.adapter_id, one.prompt, asked)
            assert outcome.prompt_logprobs == [(None, *truth)]
        wanted = 0 if one.params["logprobs"] is None else len(outcome.tokens)
        assert [entry.token_id for entry in outcome.logprobs] == outcome.tokens[:wanted]

    def pinned_bytes(self, but: str | None = None) -> int:
        pinned = {n.source for name, n in self.names.items() if n.pinned and name != but}
        return sum(SIZES[source] for source in pinned)


class AheadWalk(EngineWalk):
    """The same with a step in flight between the moves."""

    runs_ahead = True


EngineWalk.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestEngineWalk = EngineWalk.TestCase
AheadWalk.TestCase.settings = EngineWalk.TestCase.settings
TestAheadWalk = AheadWalk.TestCase
