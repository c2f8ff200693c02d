"""Which modules adapters may change, as the operator names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from loramux.adapters.spec import BaseLayout, OpenModules
from loramux.adapters.trtllm_names import NAMES, trtllm_name
from loramux.errors import ConfigError


def restrict(base: BaseLayout, words: str | None) -> BaseLayout:
    """The same base where adapters may change only what ``words``, with commas between, name.

    A word is the name of a module in full, the end of one (``q_proj``, ``mlp.up_proj``) or a name
    of TensorRT-LLM; a fused linear stands for its parts. Raises ConfigError for one that names
    nothing.
    """
    if words is None:
        return base
    names: set[str] = set()
    for word in words.split(","):
        found = {unit for unit, also in _units(base) if any(_means(word, n) for n in (unit, *also))}
        if not found:
            raise ConfigError(_names_nothing(word, base))
        names |= found
    return replace(base, open_modules=OpenModules(words, frozenset(names)))


def is_open(base: BaseLayout, module: str) -> bool:
    """Whether adapters may change any row of a module."""
    return len(base.closed_parts(module)) < len(base.parts_of(module))


def _units(base: BaseLayout) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The smallest parts of the base that can be named, and further names of what each is in."""
    wholes = {part: fusion.fused for fusion in base.fusions for part in fusion.parts}
    for module in base.modules:
        for part in base.parts_of(module):
            whole = wholes.get(part, module)
            yield part, () if whole == part else (whole,)


def _means(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}") or trtllm_name(name) == word


def _names_nothing(word: str, base: BaseLayout) -> str:
    kind = f"is a name of TensorRT-LLM, but {base.name} has" if word in NAMES else "names"
    there = ", ".join(sorted(_leaves(base)))
    return (
        f"lora_target_modules: {word!r} {kind} no such linear that can take LoRA; "
        f"there are: {there}"
    )


def _leaves(base: BaseLayout) -> Iterable[str]:
    return {name.rpartition(".")[2] for name in base.modules}
