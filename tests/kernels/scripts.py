"""Scripts beside the tests that compile kernels, which takes a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.adapter_files import REPOSITORY


def said_by(script: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """What a script prints, as JSON; ``environment`` is on top of the tests' own."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{script}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env=given | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
