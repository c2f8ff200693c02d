"""Every error a user can meet. Each one names the thing and the remedy.

LoramuxError
├── ConfigError                 an option of the command line or of a constructor
├── ModelNotServable            the base model cannot be served, with the reason
├── MissingPackage              a package that only this command or request needs is not installed
├── EngineStopped               the engine has been shut down or has failed
├── EmbeddingFailed             a prompt cannot be embedded, with the reason
├── RequestError                a request that cannot be run
│   ├── InvalidRequest          400
│   ├── UnknownModel            404
│   ├── AdapterReplaced         409
│   ├── RequestTooLarge         413
│   └── TooManyRequests         429
│       └── KeyLimitReached     429, with the seconds to wait
└── AdapterError                an adapter that cannot be loaded, found or removed
    ├── AdapterRefused          400, with every reason
    ├── AdapterSourceNotFound   404
    ├── AdapterSourceForbidden  403
    ├── AdapterSourceUnavailable 502
    ├── RegistryUnusable        503
    ├── UnknownAdapter          404
    └── AdapterExists           400
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class LoramuxError(Exception):
    """Base of all errors raised on purpose; ``http_status`` is what the server answers."""

    http_status: ClassVar[int] = 500

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled by what it holds: Exception's own way calls a constructor with the message alone.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[LoramuxError], args: Sequence[Any], fields: Mapping[str, Any]
) -> LoramuxError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(LoramuxError):
    """An option has a value that cannot work."""

    http_status = 400


class ModelNotServable(LoramuxError):
    """The base model cannot be served exactly, for the reason in the text."""

    http_status = 400

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"cannot serve {model}: {reason}")
        self.reason = reason


class MissingPackage(LoramuxError):
    """A package that only some commands or requests need is not installed."""

    http_status = 501

    def __init__(self, package: str, why: str) -> None:
        super().__init__(f"the package {package} is not installed; {why}: pip install {package}")
        self.package = package


class EngineStopped(LoramuxError):
    """The engine no longer takes requests."""

    http_status = 503


class EmbeddingFailed(LoramuxError):
    """There is no vector for a prompt, for the reason in the text; its engine goes on."""


class RequestError(LoramuxError):
    """A request that cannot be run; the engine and all other requests go on."""

    http_status = 400


class InvalidRequest(RequestError):
    """A field of a request has a value that cannot be honoured; ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(RequestError):
    """No base model and no adapter has the requested name."""

    http_status = 404

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the model {name!r} does not exist: use a name listed by GET /v1/models, "
            "or load the adapter first"
        )
        self.name = name


class AdapterReplaced(RequestError):
    """The name has come to mean an adapter with another tokenizer while the prompt was written."""

    http_status = 409

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the adapter {name!r} was replaced by one with another tokenizer while the request "
            "was on its way: send it again"
        )
        self.name = name


class RequestTooLarge(RequestError):
    """The body is larger than the server accepts."""

    http_status = 413


class TooManyRequests(RequestError):
    """The queue is full, or a limit is reached."""

    http_status = 429


class KeyLimitReached(TooManyRequests):
    """A key has used what one of its limits allows; ``retry_after`` is in whole seconds."""

    def __init__(self, key: str, limit: str, allowed: float, *, retry_after_seconds: float) -> None:
        self.retry_after = max(1, math.ceil(retry_after_seconds))
        super().__init__(
            f"the key {key!r} has reached its {limit} of {allowed}: try again in "
            f"{self.retry_after} s, or ask the operator for more"
        )
        self.key = key
        self.limit = limit


class AdapterError(LoramuxError):
    """An adapter that cannot be loaded, found or removed."""

    http_status = 400


class AdapterRefused(AdapterError):
    """The adapter would not be served exactly as PEFT does; ``reasons`` holds every finding."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        assert reasons, "a refusal needs a reason"
        head = f"adapter {name!r} is refused: "
        text = reasons[0] if len(reasons) == 1 else "".join(f"\n  - {r}" for r in reasons)
        super().__init__(head + text)
        self.name = name
        self.reasons = tuple(reasons)


class AdapterSourceNotFound(AdapterError):
    """The place an adapter should come from does not exist."""

    http_status = 404

    def __init__(self, name: str, source: str, detail: str) -> None:
        super().__init__(f"adapter {name!r}: {source}: {detail}")
        self.name = name
        self.source = source


class AdapterSourceForbidden(AdapterError):
    """This server's rules do not allow the place an adapter should come from."""

    http_status = 403

    def __init__(self, name: str, source: str, detail: str) -> None:
        super().__init__(f"adapter {name!r}: {source} is not allowed: {detail}")
        self.name = name
        self.source = source


class AdapterSourceUnavailable(AdapterError):
    """The place an adapter should come from does not answer as it should, or not to us."""

    http_status = 502

    def __init__(self, name: str, source: str, detail: str) -> None:
        super().__init__(f"adapter {name!r}: {source}: {detail}")
        self.name = name
        self.source = source


class RegistryUnusable(AdapterError):
    """The registry of adapters cannot be read or written; nothing has changed."""

    http_status = 503

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"the registry {path} cannot be used: {reason}")
        self.path = path


class UnknownAdapter(AdapterError):
    """No adapter has this name."""

    http_status = 404

    def __init__(self, name: str) -> None:
        super().__init__(
            f"no adapter is called {name!r}: GET /v1/models lists those that are loaded"
        )
        self.name = name


class AdapterExists(AdapterError):
    """The name is taken."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"adapter {name!r} cannot be loaded: {detail}")
        self.name = name
