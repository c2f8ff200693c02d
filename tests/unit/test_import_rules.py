"""Imports point one way, and what needs no torch loads none.

cli, deploy, demo -> server, engine -> scheduling -> adapters
engine.build -> worker -> model -> lora -> ops
types, errors, guide, adapter_weights, config, plan below everything
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import loramux
from tests.unit.import_graph import Import, first_loads, imports_of, read_package

_PURE = ("types", "stats", "errors", "guide", "adapter_weights", "config", "plan")
_ADAPTERS = ("adapters", "adapters.spec", "adapters.experts", "adapters.fusions")
_ENGINE = ("engine", "engine.interface")
_WORKER = ("worker", "model", "lora", "ops", "ops.tuning")
_FRONT = ("server", *_ENGINE, "engine.build", *_ADAPTERS, *_PURE, "loramux")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    # A part is named without "loramux."; "loramux" itself is the package's __init__. The longest
    # name that fits a module is its part. A part may always import itself.
    "loramux": ("types", "guide", *_ENGINE, "engine.llm"),
    "errors": (),
    "guide": ("errors",),
    "types": ("guide", "errors"),
    "stats": (),
    "adapter_weights": ("errors",),
    "config": ("adapter_weights", "errors"),
    "plan": ("types", "errors"),
    "adapters.spec": _PURE,
    "adapters.fusions": ("adapters.spec", *_PURE),
    "adapters": (*_ADAPTERS, *_PURE),
    "scheduling": (*_ADAPTERS, *_PURE),
    "ops": ("ops.tuning", *_PURE),
    "ops.tuning": ("ops", *_PURE),
    "lora": ("ops", "adapters.spec", *_PURE),
    "adapters.experts": ("adapters.spec", *_PURE),
    "model": ("lora", "ops", "adapters.spec", "adapters.experts", "adapters.fusions", *_PURE),
    # A base without weights is looked at outside of a worker, with the readers of files.
    "model.blueprint": ("model", "lora", "ops", *_ADAPTERS, "adapters.fusions", *_PURE),
    "model.merge": ("model", "lora", *_ADAPTERS, *_PURE),
    "worker": (*_WORKER, *_ADAPTERS, *_PURE),
    "worker.tune": (*_WORKER, *_PURE),
    "engine.interface": ("adapters.spec", *_PURE),
    "engine": (*_ENGINE, "scheduling", *_ADAPTERS, *_PURE),
    # The one place that names concrete parts of a worker.
    "engine.build": (*_ENGINE, *_WORKER, "scheduling", *_ADAPTERS, *_PURE),
    "engine.llm": (*_ENGINE, "engine.build", *_PURE),
    "engine.peft_oracle": ("model", *_PURE),
    "engine.verify": (*_ENGINE, "engine.build", "engine.llm", "engine.peft_oracle", *_PURE),
    "server": ("engine.interface", *_PURE, "loramux"),
    "testing": ("engine.interface", *_ADAPTERS, *_PURE),
    "demo": _FRONT,
    "cli": (
        "demo",
        "engine.llm",
        "engine.verify",
        "worker.tune",
        "ops.tuning",
        "model.blueprint",
        "model.merge",
        "lora",
        *_FRONT,
    ),
    "__main__": ("cli",),
    "deploy": _FRONT,
}

WITHOUT_TORCH = (
    "loramux", *_PURE, "engine", "engine.interface", "scheduling", "adapters", "server", "testing",
    "cli", "demo", "ops.tuning", "adapters.spec", "adapters.experts", "adapters.fusions",
)  # fmt: skip

WITH_TORCH = (
    "adapters.formats.load", "adapters.formats.mlx", "adapters.formats.nemo",
    "adapters.formats.peft",
    "adapters.formats.reader", "adapters.formats.shared_sides", "adapters.formats.tensors",
    "adapters.identity",
    "adapters.conversion", "adapters.formats.write_mlx", "adapters.formats.write_peft",
    "adapters.plain", "adapters.spectrum", "demo.convert",
    "engine.adapter_text", "engine.text",
)  # fmt: skip
"""Modules inside the parts above that read tensors; nothing there may load them at its start."""

HEAVY = (
    "torch", "transformers", "peft", "triton", "safetensors.torch", "flashinfer", "llguidance",
)  # fmt: skip

PACKAGE = Path(loramux.__file__).parent
GRAPH = read_package(PACKAGE)


def part_of(module: str) -> str:
    name = module.removeprefix("loramux.")
    fitting = [part for part in MAY_IMPORT if name == part or name.startswith(part + ".")]
    assert fitting, f"{module} belongs to no part of the table: add it with what it may import"
    return max(fitting, key=len)


def forbidden(found: Import) -> bool:
    if found.target.split(".")[0] != "loramux":
        return False
    importer, target = part_of(found.importer), part_of(found.target)
    return target != importer and target not in MAY_IMPORT[importer]


def without_torch() -> list[str]:
    return [m for m in GRAPH if part_of(m) in WITHOUT_TORCH and _short(m) not in WITH_TORCH]


def _short(module: str) -> str:
    return module.removeprefix("loramux.")


@pytest.mark.parametrize("module", GRAPH)
def test_module_imports_only_what_its_part_may(module: str) -> None:
    assert [f"line {i.line}: {i.target}" for i in GRAPH[module] if forbidden(i)] == []


@pytest.mark.parametrize("module", without_torch())
def test_module_loads_no_torch_at_its_start(module: str) -> None:
    chains = first_loads(module, GRAPH)
    assert [" -> ".join(chain) for name, chain in chains.items() if name in HEAVY] == []


def test_imported_modules_that_need_no_torch_load_none() -> None:
    # The graph knows our own imports only; this one sees what other packages load as well.
    code = f"import sys, {', '.join(without_torch())}; print('torch' in sys.modules)"
    assert _python(code) == "False"


def test_import_loramux_loads_nothing_heavy() -> None:
    code = "import sys, loramux; print(sorted({'torch', 'numpy', 'fastapi'} & set(sys.modules)))"
    assert _python(code) == "[]"


def test_the_table_names_only_known_parts() -> None:
    named = {part for allowed in MAY_IMPORT.values() for part in allowed}
    assert named <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("loramux.scheduling.scheduler", "from loramux.engine.interface import Engine"),
        ("loramux.server.app", "from loramux.engine.core import Core"),
        ("loramux.engine.core", "from loramux.worker.worker import Worker"),
        ("loramux.engine.core", "def f():\n    import loramux.engine.build"),
        ("loramux.ops.reference", "from loramux.lora.layers import LoraLinear"),
        ("loramux.types", "from loramux.config import option"),
    ],
)
def test_an_import_against_the_direction_is_found(importer: str, statement: str) -> None:
    assert [forbidden(i) for i in imports_of(statement, importer)] == [True]


def test_torch_behind_another_module_is_found() -> None:
    graph = {
        "loramux.a": imports_of("from loramux.b import x", "loramux.a"),
        "loramux.b": imports_of("import torch.nn", "loramux.b"),
    }
    assert first_loads("loramux.a", graph)["torch"] == ("loramux.a", "loramux.b", "torch")


@pytest.mark.parametrize(
    "statement",
    ["def f():\n    import torch", "if TYPE_CHECKING:\n    import torch"],
)
def test_torch_that_is_not_loaded_at_the_start_is_allowed(statement: str) -> None:
    graph = {"loramux.a": imports_of(statement, "loramux.a")}
    assert "torch" not in first_loads("loramux.a", graph)


def _python(code: str) -> str:
    path = [str(PACKAGE.parent)]
    start = f"import sys; sys.path[:0] = {path!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
