"""The styles that there are, and which one a model writes."""

from __future__ import annotations

from loramux.server.tools.hermes import HERMES
from loramux.server.tools.llama3 import LLAMA3
from loramux.server.tools.mistral import MISTRAL
from loramux.server.tools.style import Style

STYLES = {style.name: style for style in (HERMES, LLAMA3, MISTRAL)}


def find_style(template: str) -> Style | None:
    """The style of the calls in a chat template's literal text, or None if it says nothing."""
    return next((style for style in STYLES.values() if style.is_in(template)), None)
