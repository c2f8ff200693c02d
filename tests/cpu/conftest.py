"""One thread, since tiny matrices gain nothing from more; and tokenizers of three kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cpu import tokenizers_of_kinds


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Threads that wait for a busy core lose."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Byte-level BPE with a chat template: the tokens 0 to 255 are bytes, 294 to 299 special."""
    return tokenizers_of_kinds.byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """BPE over characters, a mark for spaces, no chat template."""
    return tokenizers_of_kinds.characters(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def sentencepiece() -> Any:
    """As Llama 2 has it: bytes for unknown characters, a space stripped where a text begins."""
    return tokenizers_of_kinds.sentencepiece()
