"""The base of everything that a request may hold."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

NoOps = dict[str, tuple[Any, ...]]
"""Values of fields that ask for nothing."""


class Strict(BaseModel):
    """A JSON object whose fields are all known and have exactly their types.

    ``no_op`` lists fields that are not supported with the values that ask for nothing: clients
    send those by default, so they are let through. Any other value is refused by the name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    no_op: ClassVar[NoOps] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if not any(value == no_op for no_op in cls.no_op.get(name, ()))
        }
