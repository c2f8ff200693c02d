"""Settings of a process that has nothing but an engine: no thread is to hold up its steps.

While an adapter of 18,432 modules is read, Python's own ones make the thread of the steps wait for
5 ms again and again, and for a third of a second where all that a model is made of is gone through
for garbage (docs/performance.md).
"""

from __future__ import annotations

import gc
import sys

_SWITCH_SECONDS = 0.001
"""For which a thread may keep the interpreter when another one asks for it; Python's is 5 ms."""
_THRESHOLDS = 50_000, 20, 50
"""New objects, and collections of the next younger ones, before a collection. What an adapter is
read into is garbage of no cycle, so looking for cycles again and again finds nothing."""


def keep_steps_steady() -> None:
    """To be called when the model is loaded: what is there now stays as long as the process."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
