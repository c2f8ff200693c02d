"""A vocabulary larger than the base's: whole embeddings and heads with more rows.

PEFT needs a base that was resized before, and has rows of its own making wherever the adapter
brings none. Only what the adapter says in full is certain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from loramux.adapters.spec import BaseLayout, Replacement

MAX_GROWTH = 2
"""Times the base's vocabulary. Steps in which the adapter takes part have logits that wide."""


def ends_of(base: BaseLayout) -> tuple[str, ...]:
    """Embedding and head, as far as adapters may change them."""
    return tuple(end for end in (base.embedding, base.head) if end is not None)


def num_tokens(base: BaseLayout, end: str) -> int:
    """Rows of the base's embedding or head; 0 where they are not known."""
    return base.replaceable.get(end, {}).get("weight", (0,))[0]


def grown_to(base: BaseLayout, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int | None:
    """The size of the vocabulary that whole parameters of modules ask for; None: the base's."""
    ends = ends_of(base)
    sizes = (shape[0] for module, shape in shapes if module in ends and shape)
    known = max((num_tokens(base, end) for end in ends), default=0)
    return max((size for size in sizes if size > known), default=None)


def objections(
    base: BaseLayout, vocab_size: int, made: Collection[Replacement], adapted: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Why a vocabulary of this size cannot be served, and the module concerned."""
    grown = f"the vocabulary has {vocab_size} tokens"
    if base.embedding is None or base.head is None:
        missing = "embedding" if base.embedding is None else "lm_head"
        yield f"{grown}, and the {missing} of this base cannot be replaced", base.name
    whole = {(r.module, r.parameter) for r in made if r.rows is None}
    for end in ends_of(base):
        if vocab_size > MAX_GROWTH * num_tokens(base, end):
            limit = MAX_GROWTH * num_tokens(base, end)
            yield f"{grown}, more than {MAX_GROWTH} times the base's (at most {limit})", end
        if end in adapted:
            yield (
                f"{grown}: LoRA on an embedding or lm_head with more than the base's is not served",
                end,
            )
        for parameter in base.replaceable[end]:
            if (end, parameter) not in whole:
                yield (
                    f"{grown}, and the file does not hold all of it: save the adapter with "
                    "save_embedding_layers=True",
                    f"{end}.{parameter}",
                )
