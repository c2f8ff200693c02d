"""What the command line writes to stderr while it works."""

from __future__ import annotations

import logging
import os

from loramux.errors import ConfigError


def setup_logging() -> None:
    """loramux's own events from the level in ``LORAMUX_LOG`` (default INFO), others' warnings."""
    level = os.environ.get("LORAMUX_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"LORAMUX_LOG is {level!r}: use DEBUG, INFO, WARNING or ERROR")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("loramux").setLevel(level)
