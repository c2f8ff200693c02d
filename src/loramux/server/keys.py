"""Who calls, told by a key, and what that key may do."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from loramux.server.limits import Account, Clock, Limits
from loramux.types import MIN_PRIORITY


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key. It is known by its digest alone, and called by its name."""

    name: str
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    admin: bool = False
    """It may load, change and unload adapters, and sees all of them."""
    infer: bool = True
    """It may send requests to models."""
    adapters: tuple[str, ...] | None = None
    """Names or shell-style patterns of the models it may ask, the base among them; None: all."""
    min_priority: int | None = None
    """The lowest number, which is the most urgent, that its requests may have; None: all have 0."""
    limits: Limits = field(default_factory=Limits)

    def may_ask(self, model: str) -> bool:
        """Whether it may send requests to ``model``, which need not exist."""
        if self.adapters is None:
            return self.infer
        # A name that has the signs of a pattern in it still means itself.
        return self.infer and any(model == p or fnmatchcase(model, p) for p in self.adapters)


@dataclass(frozen=True)
class Caller:
    """Whom a request comes from: a key, or anyone where none is needed."""

    key: Key | None
    account: Account

    def may_ask(self, model: str) -> bool:
        return self.key is None or self.key.may_ask(model)

    @property
    def min_priority(self) -> int | None:
        """The lowest number that it may send; None if it may send none."""
        return MIN_PRIORITY if self.key is None else self.key.min_priority

    @property
    def default_priority(self) -> int:
        """Of requests that ask for none."""
        return max(0, self.min_priority or 0)

    def may_have(self, priority: int) -> bool:
        """Whether its requests may have a priority; 0 is what all have that may send none."""
        least = self.min_priority
        return priority == 0 if least is None else priority >= least

    def cache_salt(self, asked: str | None) -> str | None:
        """The salt of a request that asks for one, or none: keys share nothing with each other."""
        if self.key is None:
            return asked
        # The names of keys hold no slash, so no salt of one key is that of another.
        return self.key.name if asked is None else f"{self.key.name}/{asked}"

    def may_see(self, model: str) -> bool:
        """Whether lists show it: to administer models is to know them."""
        return self.may_ask(model) or (self.key is not None and self.key.admin)


class Keyring:
    """All keys of one server, and what each has used. Belongs to one event loop."""

    def __init__(
        self, keys: Sequence[Key] = (), *, open_inference: bool, clock: Clock = time.monotonic
    ) -> None:
        """``open_inference``: requests to models need no key, and no limit holds for them."""
        self.open_inference = open_inference
        self.anyone = Caller(None, Account("anyone", Limits(), clock=clock))
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """Let in these and no others from now on; requests that run go on.

        A name keeps its account, with the limits that it has now.
        """
        self._callers = [Caller(key, self._account_of(key)) for key in keys]
        self.keys = tuple(keys)
        self.is_current = True
        """Whether the newest attempt to read them has succeeded."""
        self.read_at = time.time()
        """Unix time of the last one that has."""

    def note_failure(self) -> None:
        """The keys could not be read again."""
        self.is_current = False

    @property
    def accounts(self) -> list[Account]:
        """What each key has used, in the order in which they came: those that are gone, too, since
        requests of theirs may run, and counters must not fall when one comes back."""
        return list(self._accounts.values())

    def find(self, key: bytes) -> Caller | None:
        """Who has this key. It is compared with all, so the time taken tells nothing of any."""
        digest = hashlib.sha256(key).digest()
        found = None
        for caller in self._callers:
            assert caller.key is not None
            if hmac.compare_digest(caller.key.digest, digest):
                found = caller
        return found

    def _account_of(self, key: Key) -> Account:
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key.name, key.limits, clock=self._clock)
        else:
            account.change_limits(key.limits)
        return account
