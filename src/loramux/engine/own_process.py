"""Settings of a process that has nothing but an engine.

No thread is to hold up its steps. While an adapter of 18,432 modules is read, Python's own settings
make the thread of the steps wait for 5 ms again and again, and for a third of a second where all
that a model is made of is gone through for garbage (docs/performance.md).

What compilers make at its start is to be there at the next one.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import MutableMapping

from loramux.config import cache_folder

log = logging.getLogger(__name__)

_COMPILERS = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""What tells each compiler where to keep what it has made, and its part of the folder. Left to
themselves they use three places: one is in ``/tmp``, the others in a home directory."""

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


def keep_compiled(environ: MutableMapping[str, str]) -> None:
    """Have compilers keep what they make in one folder, which a unit or a container can keep.

    To be called before any of them is imported. What the environment says already holds.
    """
    folder = cache_folder(environ) / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("%s cannot be made (%s): the next start compiles again", folder, error)
        return
    for name, part in _COMPILERS.items():
        environ.setdefault(name, str(folder / part))
