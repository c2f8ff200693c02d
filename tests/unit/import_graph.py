"""The import statements of a package, read from its source and not by importing it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """``importer`` names the module ``target``, its own or another package's, at ``line``."""

    importer: str
    target: str
    line: int
    at_start: bool
    """It runs when the module is loaded: not inside a function, not for type checkers only."""


def read_package(root: Path) -> dict[str, list[Import]]:
    """Every module of the package in ``root``, by full name, with its imports."""
    paths = {_module_name(root, path): path for path in root.rglob("*.py")}
    return {
        name: imports_of(path.read_text(encoding="utf-8"), name, modules=paths)
        for name, path in sorted(paths.items())
    }


def imports_of(source: str, importer: str, *, modules: Collection[str] = ()) -> list[Import]:
    """``modules`` tell ``from package import module`` from ``from module import name``."""
    return [
        Import(importer, target, node.lineno, at_start)
        for node, at_start in _import_nodes(ast.parse(source), at_start=True)
        for target in _targets(node, modules)
    ]


def first_loads(start: str, graph: Mapping[str, list[Import]]) -> dict[str, tuple[str, ...]]:
    """Every module that importing ``start`` loads, with the chain of modules that leads to it."""
    chains = {start: (start,)}
    queue = [start]
    for module in queue:
        for target in (i.target for i in graph.get(module, ()) if i.at_start):
            # Loading a.b.c runs a/__init__.py and a/b/__init__.py first.
            parts = target.split(".")
            for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                if name not in chains:
                    chains[name] = (*chains[module], name)
                    queue.append(name)
    return chains


def _module_name(root: Path, path: Path) -> str:
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _import_nodes(
    node: ast.AST, *, at_start: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_start
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _import_nodes(
                child, at_start=at_start and not later and not _is_for_type_checkers(child)
            )


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _targets(node: ast.Import | ast.ImportFrom, modules: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, f"line {node.lineno}: write the whole name, not a relative import"
    assert node.module is not None
    for alias in node.names:
        inner = f"{node.module}.{alias.name}"
        yield inner if inner in modules else node.module
