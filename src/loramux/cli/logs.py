"""What the command line writes to stderr while it works."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from loramux.errors import ConfigError
from loramux.server.request_log import request_id


def setup_logging(log_format: str = "text") -> None:
    """loramux's own events from the level in ``LORAMUX_LOG`` (default INFO), others' warnings.

    ``log_format``: text, or json with an object a line. Raises ConfigError for another level.
    """
    level = os.environ.get("LORAMUX_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"LORAMUX_LOG is {level!r}: use DEBUG, INFO, WARNING or ERROR")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("loramux").setLevel(level)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message, with the request's id where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        current = request_id.get()
        return line if current is None else f"{line} [{current}]"


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, ``message``; ``request_id``,
    ``exception`` and what the event is made of, where there is any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}), default=str)
