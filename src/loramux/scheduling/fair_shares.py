"""Whose turn it is among adapters that have shares of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loramux.adapter_weights import AdapterWeights
from loramux.types import RequestId

_HEAVIEST_PRICE = 10**6
"""What a token costs the adapter with the largest weight, in units of virtual time. Prices are
whole numbers, so that what is charged and given back adds up exactly, however long that goes on."""
_FEW = 64
"""So many accounts are no reason to look for those that can be dropped."""


@dataclass(slots=True)
class _Account:
    """What one adapter has had, and is to get for the requests that it has sent."""

    finish: int = 0
    """When all that it has been charged for is paid, in virtual time."""
    num_open: int = 0
    waiting: dict[RequestId, int] = field(default_factory=dict)
    """Virtual starts of requests that have not started, in order of arrival and of the starts."""


@dataclass(slots=True)
class _Level:
    """The requests of one priority."""

    now: int = 0
    """Virtual time: the largest virtual start of a request that has started."""
    num_open: int = 0
    accounts: dict[str | None, _Account] = field(default_factory=dict)
    max_accounts: int = _FEW
    """With as many, those that can be dropped are, before another one is opened."""


@dataclass(frozen=True, slots=True)
class _Charge:
    """What an open request was charged for."""

    adapter: str | None
    priority: int
    cost: int


class FairShares:
    """Gives requests virtual starts, so that adapters get tokens in proportion to their weights.

    This is start-time fair queueing (Goyal et al., 1996) over the names of adapters, None being the
    base, with many requests running side by side (SFQ(D); Jin et al., 2004). When a request
    arrives, its adapter is charged its cost, which is the most tokens that it may use, and that
    takes cost / weight of virtual time. The request's virtual start is where the charges before it
    end, and not before the virtual time of its arrival: who has been idle has no credit. When it
    ends, what it has not used comes back to requests that arrive later. Starts that were given
    stay, and nobody passes an earlier request of its own adapter.

    Each priority has accounts and a virtual time of its own, which begin anew when none of its
    requests is left. From then on, where requests start in order of their virtual starts, and with
    c for the cost of an adapter's largest request:

    - An adapter has used at most weight * virtual time + c tokens.
    - One that has had requests waiting all the while has been charged at least weight * virtual
      time.
    - So if two wait all the while, and use what they are charged for, neither is ahead by more than
      the larger c / weight, in tokens of started requests over weight, however long they compete.
      (VTC, Sheng et al. 2023, arXiv:2401.00588, charges tokens as they are made; its bound is two
      batches full.)
    - Until a request starts, another adapter has used at most weight * virtual start + c tokens:
      nobody makes it wait without end, whatever he sends.

    Accounts that say nothing any more are dropped when there are many: those without an open
    request that have no charge beyond the virtual time, or whose name is gone (``is_named``).
    """

    def __init__(self, weights: AdapterWeights, is_named: Callable[[str], bool]) -> None:
        self._weights = weights
        self._heaviest = weights.heaviest
        self._is_named = is_named
        self._levels: dict[int, _Level] = {}
        self._charges: dict[RequestId, _Charge] = {}

    @property
    def num_accounts(self) -> int:
        return sum(len(level.accounts) for level in self._levels.values())

    def now(self, priority: int) -> int:
        """The virtual time of a priority."""
        level = self._levels.get(priority)
        return 0 if level is None else level.now

    def price(self, adapter: str | None) -> int:
        """The virtual time that a token of an adapter takes."""
        return round(_HEAVIEST_PRICE * (self._heaviest / self._weights.of(adapter)))

    def enter(self, request_id: RequestId, adapter: str | None, *, priority: int, cost: int) -> int:
        """A request arrives that may use ``cost`` tokens; its virtual start."""
        assert request_id not in self._charges, "a request enters twice"
        level = self._levels.setdefault(priority, _Level())
        account = level.accounts.get(adapter) or self._open_account(level, adapter)
        account.finish = max(account.finish, level.now)
        last = next(reversed(account.waiting.values()), 0)
        start = account.waiting[request_id] = max(account.finish, last)
        account.finish += cost * self.price(adapter)
        account.num_open += 1
        level.num_open += 1
        self._charges[request_id] = _Charge(adapter, priority, cost)
        return start

    def note_start(self, request_id: RequestId) -> None:
        """A request starts to run for the first time."""
        charge = self._charges[request_id]
        level = self._levels[charge.priority]
        start = level.accounts[charge.adapter].waiting.pop(request_id)
        level.now = max(level.now, start)

    def leave(self, request_id: RequestId, used: int) -> None:
        """A request has ended, started or not, and has used so many tokens."""
        charge = self._charges.pop(request_id)
        assert 0 <= used <= charge.cost, "more is used than was charged for"
        level = self._levels[charge.priority]
        account = level.accounts[charge.adapter]
        account.waiting.pop(request_id, None)
        account.finish -= (charge.cost - used) * self.price(charge.adapter)
        account.num_open -= 1
        level.num_open -= 1
        if not level.num_open:
            del self._levels[charge.priority]

    def check(self, started: Mapping[RequestId, bool]) -> None:
        """Assert that the open requests are these, and which of them have started."""
        assert started.keys() == self._charges.keys(), "a charge is lost"
        waiting = [
            request_id
            for level in self._levels.values()
            for account in level.accounts.values()
            for request_id in account.waiting
        ]
        assert sorted(waiting) == sorted(r for r, has_started in started.items() if not has_started)
        for level in self._levels.values():
            accounts = level.accounts.values()
            assert level.num_open == sum(account.num_open for account in accounts) > 0
            for account in accounts:
                starts = list(account.waiting.values())
                assert starts == sorted(starts), "a request passes one of its own adapter"
        assert len(self._charges) == sum(level.num_open for level in self._levels.values())

    def _open_account(self, level: _Level, adapter: str | None) -> _Account:
        if len(level.accounts) >= level.max_accounts:
            level.accounts = {n: a for n, a in level.accounts.items() if self._matters(level, n, a)}
            # Twice those that stay, so that looking costs each new account no more than a few.
            level.max_accounts = max(_FEW, 2 * len(level.accounts))
        account = level.accounts[adapter] = _Account()
        return account

    def _matters(self, level: _Level, adapter: str | None, account: _Account) -> bool:
        if account.num_open:
            return True
        return account.finish > level.now and (adapter is None or self._is_named(adapter))
