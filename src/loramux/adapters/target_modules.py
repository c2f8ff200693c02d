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
    nothing, or two things.
    """
    if words is None:
        return base
    names: set[str] = set()
    for word in words.split(","):
        named = {unit for unit, also in _units(base) if any(_ends(n, word) for n in (unit, *also))}
        meant = {unit for unit, also in _units(base) if word in map(trtllm_name, (unit, *also))}
        if not named | meant:
            raise ConfigError(_names_nothing(word, base))
        if named and meant - named:
            raise ConfigError(
                f"lora_target_modules: {word!r} is the name of {min(named)}, and TensorRT-LLM's of "
                f"{min(meant)}: write more of the one that is meant"
            )
        names |= named | meant
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


def _ends(name: str, word: str) -> bool:
    return f".{name}".endswith(f".{word}")


def _names_nothing(word: str, base: BaseLayout) -> str:
    kind = f"is a name of TensorRT-LLM, but {base.name} has" if word in NAMES else "names"
    there = ", ".join(sorted(_leaves(base)))
    return (
        f"lora_target_modules: {word!r} {kind} no such linear that can take LoRA; "
        f"there are: {there}"
    )


def _leaves(base: BaseLayout) -> Iterable[str]:
    return {name.rpartition(".")[2] for name in base.modules}
