from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "report",
        "inspected",
        "inspection",
        "unusual",
        "sources",
        "source_rules",
        "disk_cache",
        "remotes.archives",
        "remotes.fetch",
        "loaded",
        "formats.files",
        "formats.safetensors_header",
        "formats.peft_config",
        "formats.peft_keys",
        "formats.peft_patterns",
        "formats.module_names",
        "formats.peft_spec",
        "formats.meaning",
        "formats.mlx_config",
        "formats.torch_header",
        "formats.torch_pickle",
        "formats.zip_records",
        "formats.places",
        "fusions",
    ],
)
def test_module_imports_no_torch(module: str):
    code = f"import sys, loramux.adapters.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
