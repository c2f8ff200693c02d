"""Virtual starts: tokens by weight, no credit for idleness, and nobody waits without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loramux.adapter_weights import AdapterWeights
from loramux.scheduling.fair_shares import FairShares
from loramux.types import RequestId

costs = st.integers(1, 1000)


@dataclass(eq=False)
class Sent:
    request_id: RequestId
    adapter: str | None
    priority: int
    cost: int
    start: int
    started: bool = False


class Line:
    """Requests that start one by one in order of their turns, as a scheduler has it."""

    def __init__(self, weights: str = "*=1") -> None:
        self.named: set[str] | None = None
        """Adapters that there are; None: all."""
        self.shares = FairShares(AdapterWeights.parse(weights), self.is_named)
        self.waiting: list[Sent] = []
        self.started: list[Sent] = []
        self.count = 0
        self.num_asked = 0

    def is_named(self, name: str) -> bool:
        self.num_asked += 1
        return self.named is None or name in self.named

    def send(self, adapter: str | None, cost: int, priority: int = 0) -> Sent:
        request_id = RequestId(f"r{self.count}")
        self.count += 1
        start = self.shares.enter(request_id, adapter, priority=priority, cost=cost)
        sent = Sent(request_id, adapter, priority, cost, start)
        self.waiting.append(sent)
        return sent

    @property
    def first(self) -> Sent:
        return min(self.waiting, key=lambda sent: (sent.priority, sent.start))

    def start(self) -> Sent:
        first = self.first
        self.waiting.remove(first)
        self.started.append(first)
        first.started = True
        self.shares.note_start(first.request_id)
        return first

    def end(self, sent: Sent, used: int | None = None) -> None:
        (self.started if sent.started else self.waiting).remove(sent)
        self.shares.leave(sent.request_id, sent.cost if used is None else used)

    def run(self) -> list[Sent]:
        """Start all that wait, each when the one before has ended."""
        order = []
        while self.waiting:
            order.append(self.start())
            self.end(order[-1])
        return order

    def check(self) -> None:
        self.shares.check({s.request_id: s.started for s in [*self.waiting, *self.started]})


@given(heavy=st.lists(costs, min_size=1), light=st.lists(costs, min_size=1))
def test_tokens_are_4_to_1_within_one_request(heavy: list[int], light: list[int]) -> None:
    line = Line("sql=4,chat=1")
    for adapter, sizes in (("sql", heavy), ("chat", light)):
        for cost in sizes:
            line.send(adapter, cost)
    had = Counter[str | None]()
    while {sent.adapter for sent in line.waiting} == {"sql", "chat"}:
        sent = line.start()
        had[sent.adapter] += sent.cost
        assert abs(had["sql"] / 4 - had["chat"]) <= max(max(heavy) / 4, max(light))


def test_the_share_of_an_idle_adapter_is_used_by_others() -> None:
    line = Line("a=1,b=1,c=1")
    for _ in range(40):
        line.send("a", 10)
        line.send("b", 10)
    assert Counter(sent.adapter for sent in line.run()[:20]) == {"a": 10, "b": 10}


@given(
    alone=st.lists(costs, min_size=1, max_size=20),
    later=st.lists(costs, min_size=1, max_size=20),
    others=st.lists(costs, min_size=1, max_size=20),
)
def test_an_idle_adapter_gets_no_credit(
    alone: list[int], later: list[int], others: list[int]
) -> None:
    line = Line()
    line.send("b", 1)
    line.end(line.start())
    for cost in alone:
        line.send("a", cost)
        line.start()
    began = line.shares.now(0)
    for cost in later:
        line.send("a", cost)
    came_back = [line.send("b", cost) for cost in others]
    assert came_back[0].start >= began
    had = Counter[str | None]()
    while {sent.adapter for sent in line.waiting} == {"a", "b"}:
        sent = line.start()
        had[sent.adapter] += sent.cost
        assert had["b"] - had["a"] <= max(*alone, *later, *others) + max(others)


@given(flood=st.lists(st.tuples(st.sampled_from("abc"), costs), min_size=300, max_size=300))
def test_nobody_makes_a_request_wait_without_end(flood: Sequence[tuple[str, int]]) -> None:
    line = Line("a=4,b=2,mine=1")
    for adapter in "abc":
        line.send(adapter, 1000)
    line.send("mine", 10)
    mine = line.send("mine", 10)
    began = line.shares.now(0)
    had = Counter[str | None]()
    for adapter, cost in flood:
        line.send(adapter, cost)
        line.send(adapter, cost)
        sent = line.start()
        if sent is mine:
            break
        had[sent.adapter] += sent.cost
    assert mine.started
    for adapter in "abc":
        weighed = (mine.start - began) / line.shares.price(adapter)
        assert had[adapter] <= weighed + 1000


@given(moves=st.lists(st.tuples(st.sampled_from(("send", "start", "end", "cancel")), costs)))
def test_one_adapter_is_served_in_order_of_arrival(moves: list[tuple[str, int]]) -> None:
    line = Line()
    for move, number in moves:
        if move == "send":
            line.send("a", number)
        elif move == "start" and line.waiting:
            assert line.start().request_id == min(
                (s.request_id for s in [*line.waiting, line.started[-1]]), key=lambda i: int(i[1:])
            )
        elif move == "end" and line.started:
            sent = line.started[number % len(line.started)]
            line.end(sent, number % (sent.cost + 1))
        elif move == "cancel" and line.waiting:
            line.end(line.waiting[number % len(line.waiting)], 0)
        line.check()


def test_what_is_not_used_comes_back_for_later_requests() -> None:
    line = Line()
    keep = line.send("b", 5)
    first, second = line.send("a", 1000), line.send("a", 1000)
    line.start(), line.start()
    line.end(first, 10)
    price = line.shares.price("a")
    assert second.start == 1000 * price
    assert line.send("a", 1).start == 1010 * price
    line.end(keep)


def test_in_the_long_run_what_is_used_counts_and_not_what_is_charged() -> None:
    """Each has 20 requests open, for 4 places, and sends one when one ends."""
    line = Line()
    charged = {"a": 1000, "b": 100}
    had = Counter[str | None]()
    for adapter, cost in charged.items():
        for _ in range(20):
            line.send(adapter, cost)
    behind = []
    for number in range(4000):
        while len(line.started) < 4:
            line.start()
        done = line.started[number % 4]
        line.end(done, 100)
        had[done.adapter] += 100
        line.send(done.adapter, charged[str(done.adapter)])
        behind.append(had["b"] - had["a"])
    assert max(behind) <= 20 * 1000  # what its first requests were charged for
    assert abs(behind[-1] - behind[1000]) <= 1000
    assert had["a"] > 0.9 * had["b"]


def test_a_cancelled_flood_costs_nothing() -> None:
    line = Line()
    line.send("b", 5)
    flood = [line.send("a", 1000) for _ in range(100)]
    for sent in flood:
        line.end(sent, 0)
    assert line.send("a", 1).start == line.shares.now(0)


def test_a_later_request_does_not_pass_one_of_its_own_adapter() -> None:
    line = Line()
    running, waiting = line.send("a", 1000), line.send("a", 1000)
    line.start()
    last = line.send("a", 1000)
    line.end(running, 1)
    line.end(waiting, 0)
    assert line.send("a", 1).start == last.start


def test_priorities_have_shares_of_their_own() -> None:
    line = Line()
    for _ in range(9):
        line.send("a", 100, priority=-1)
    assert line.send("a", 100).start == 0
    order = line.run()
    assert [sent.priority for sent in order] == [-1] * 9 + [0]


def test_when_nobody_is_left_all_begin_anew() -> None:
    line = Line()
    for _ in range(9):
        line.send("a", 100)
    line.run()
    assert line.shares.num_accounts == 0
    assert line.send("a", 1).start == line.send("b", 1).start == 0


def test_a_name_keeps_its_account_when_it_is_loaded_again() -> None:
    line = Line()
    line.named = {"a", "b"}
    line.send("b", 1)
    line.send("a", 100)
    line.start(), line.start()
    line.named = {"b"}
    line.named = {"a", "b"}
    assert line.send("a", 1).start == 100 * line.shares.price("a")


def test_names_that_come_and_go_leave_no_accounts() -> None:
    line = Line()
    line.named = {"stays"}
    line.send("stays", 10**9)
    line.start()
    most = 0
    for number in range(20_000):
        sent = line.send(f"tenant-{number}", 10)
        line.start()
        line.end(sent)
        most = max(most, line.shares.num_accounts)
    assert most <= 64
    line.check()


def test_accounts_of_names_that_stay_are_kept() -> None:
    line = Line()
    line.send("first", 1)
    line.start()
    for number in range(2000):
        line.end(line.send(f"tenant-{number}", 10), 10)
    assert line.send("tenant-0", 1).start == 10 * line.shares.price("tenant-0")
    assert line.num_asked < 2 * 2000  # not all of them for each that comes


def test_an_account_stays_while_a_request_is_open() -> None:
    line = Line()
    long = line.send("long", 10)
    line.start()
    for _ in range(3):
        line.send("b", 100)
        line.start()
    assert line.shares.now(0) > 10 * line.shares.price("long")
    for number in range(200):
        line.send(f"tenant-{number}", 1)
    line.end(long, 4)
    line.check()


def test_sums_are_exact_however_long_it_goes_on() -> None:
    line = Line("a=0.3,b=7")
    line.send("b", 1)
    first = line.send("a", 10**15)
    for _ in range(1000):
        line.end(line.send("a", 10**15 + 1), 0)
    line.end(first, 0)
    assert line.send("a", 1).start == 0


class Walk(RuleBasedStateMachine):
    """What the docstring of FairShares promises, whatever is sent, cancelled and left unused."""

    weights = "a=4,b=0.7,*=1"
    names = ("a", "b", "c", None)

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(self.weights)
        self.uses: dict[Sent, int] = {}
        """What each that runs will have used."""
        self.begin()

    def begin(self) -> None:
        """Nobody is left."""
        self.used = Counter[str | None]()
        self.gone = Counter[str | None]()
        """What those were charged that wait no more."""
        self.largest = Counter[str | None]()
        self.backlogged = set(self.names)
        """Adapters with requests waiting whenever one started."""

    @rule(adapter=st.sampled_from(names), cost=costs, count=st.integers(1, 4))
    def send(self, adapter: str | None, cost: int, count: int) -> None:
        for _ in range(count):
            self.line.send(adapter, cost)
        self.largest[adapter] = max(self.largest[adapter], cost)

    @precondition(lambda self: self.line.waiting)
    @rule(share=st.sampled_from((1.0, 1.0, 0.5, 0.01)))
    def start(self, share: float) -> None:
        self.backlogged &= {sent.adapter for sent in self.line.waiting}
        sent = self.line.start()
        for adapter in self.names:
            price = self.price(adapter)
            assert self.used[adapter] * price <= sent.start + self.largest[adapter] * price
        self.uses[sent] = max(1, int(share * sent.cost))
        self.used[sent.adapter] += self.uses[sent]
        self.gone[sent.adapter] += sent.cost

    @precondition(lambda self: self.line.started)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.line.started))
        self.line.end(sent, self.uses.pop(sent))
        self.note_left()

    @precondition(lambda self: self.line.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.line.waiting))
        self.line.end(sent, 0)
        self.gone[sent.adapter] += sent.cost
        self.note_left()

    def note_left(self) -> None:
        if not (self.line.waiting or self.line.started):
            self.begin()

    def price(self, adapter: str | None) -> int:
        return self.line.shares.price(adapter)

    @invariant()
    def nobody_has_more_than_a_share_and_a_request(self) -> None:
        self.line.check()
        now = self.line.shares.now(0)
        for adapter, used in self.used.items():
            assert used * self.price(adapter) <= now + self.largest[adapter] * self.price(adapter)

    @invariant()
    def who_waits_all_the_while_is_charged_for_a_share(self) -> None:
        now = self.line.shares.now(0)
        for adapter in self.backlogged:
            assert self.gone[adapter] * self.price(adapter) >= now


Walk.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestWalk = Walk.TestCase


class TestWeights:
    def test_others_and_the_base(self) -> None:
        weights = AdapterWeights.parse(" sql = 4,a=b=2,llama=3,*=0.5", base_name="llama")
        assert [weights.of(name) for name in ("sql", "a=b", "else", None)] == [4, 2, 0.5, 3]
        assert weights.heaviest == 4

    def test_who_is_not_named_has_one(self) -> None:
        weights = AdapterWeights.parse("sql=4")
        assert (weights.of("chat"), weights.of(None)) == (1, 1)

    def test_one_weight_for_all(self) -> None:
        assert AdapterWeights.parse("*=3").of(None) == 3

    def test_prices_hang_on_ratios_alone(self) -> None:
        low = FairShares(AdapterWeights.parse("a=4e-300,*=1e-300"), lambda name: True)
        high = FairShares(AdapterWeights.parse("a=4e300,*=1e300"), lambda name: True)
        assert low.price("a") * 4 == low.price("b") == high.price("b") == high.price("a") * 4
