"""A tokenizer of the adapter's own: who uses it, and how long it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from loramux.adapters.sources import AdapterSources
from loramux.engine.adapters import AdapterReader
from loramux.testing import expected_tokens
from loramux.testing.worker import VOCAB_SIZE
from loramux.types import AdapterId
from tests.unit.small_engine import SmallEngine

GROWN = {"g": VOCAB_SIZE + 4, "h": VOCAB_SIZE + 9}
G = AdapterId("g")


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine(adapters=["a"], vocab_sizes=GROWN)


def test_an_adapter_of_the_base_s_vocabulary_speaks_as_the_base_does(engine: SmallEngine) -> None:
    assert engine.languages.of(AdapterId("a")) is engine.languages.of(None)
    assert engine.languages.known() == set()


def test_a_larger_vocabulary_has_a_language_while_the_adapter_has_a_name(
    engine: SmallEngine,
) -> None:
    engine.load("g")
    assert engine.languages.known() == {G}
    engine.load("again", "g")
    engine.unload("g")
    assert engine.languages.known() == {G}
    engine.unload("again")
    assert engine.languages.known() == set()


def test_a_language_stays_until_the_last_request_has_ended(engine: SmallEngine) -> None:
    engine.load("x", "g")
    engine.submit("x", [VOCAB_SIZE + 1, 2], max_tokens=3, ignore_eos=True)
    engine.load("x", "h", replace=True)
    assert engine.languages.known() == set(GROWN)
    engine.run()
    assert engine.languages.known() == {AdapterId("h")}


def test_a_refused_adapter_leaves_no_language(engine: SmallEngine) -> None:
    big = SmallEngine(arena_bytes=1, adapter_bytes={"g": 2}, vocab_sizes=GROWN)
    with pytest.raises(Exception, match="device-cache"):
        big.load("g")
    assert big.languages.known() == set()


def test_the_end_of_text_of_an_adapter_ends_its_answers_alone(engine: SmallEngine) -> None:
    """The token 7 is a whole text's end in the adapter's language, and a token like others else."""
    engine.load("g")
    prompts = {
        name: next(
            prompt
            for prompt in ([i, j] for i in range(VOCAB_SIZE) for j in range(VOCAB_SIZE))
            if 7 in expected_tokens(name, prompt, 3)
        )
        for name in (None, "g")
    }
    ids = {name: engine.submit(name, prompt, max_tokens=4) for name, prompt in prompts.items()}
    engine.run()
    [base], [grown] = engine.outcomes[ids[None]], engine.outcomes[ids["g"]]
    assert (base.finish_reason, len(base.tokens)) == ("length", 4)
    assert (grown.finish_reason, grown.tokens[-1]) == ("stop", 7)


def test_other_files_of_the_tokenizer_are_another_adapter(
    engine: SmallEngine, tmp_path: Path
) -> None:
    reader = AdapterReader(engine.worker, AdapterSources(), engine.languages)
    folders = [tmp_path / parent / name for parent in ("one", "two") for name in ("g", "a")]
    for folder in folders:
        folder.mkdir(parents=True)
    ids = [reader.read("x", str(folder)).prepared.adapter_id for folder in folders]
    assert ids[0] != ids[2], "the fake reader's language hangs on the folder"
    assert ids[1] == ids[3] == "a"
    assert reader.read("x", str(folders[0])).prepared.adapter_id == ids[0]
