"""``loramux verify`` as an operator runs it, on a real model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_shipped_adapter_agrees_with_peft(
    smollm2_base: Path, smollm2_adapters: dict[str, Path]
) -> None:
    command = [sys.executable, "-m", "loramux", "verify", smollm2_base, smollm2_adapters["pirate"]]
    short = ["--chat", "--prompt=What is the sea made of?", "--max-tokens=4"]
    done = subprocess.run(
        [*command, *short], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict, *_, base, pirate = done.stdout.splitlines()
    assert verdict == "agrees with PEFT within 0.001"
    assert base.split()[:2] == ["(base)", "agrees"]
    assert pirate.split()[:2] == ["pirate", "agrees"]
