"""Tokenizers of three kinds, small enough to be made in a test."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TESTS = Path(__file__).parents[1]

WORDS = ["▁", "▁▁", "▁Hello", "▁world", "a", "!", "é"]
"""What ``sentencepiece`` has beside bytes and special tokens."""


def byte_level(folder: Path) -> Any:
    """Byte-level BPE with a chat template: the tokens 0 to 255 are bytes, 294 to 299 special."""
    _load(TESTS / "conformance/make_cases.py").save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def characters(folder: Path) -> Any:
    """BPE over characters, a mark for spaces, no chat template."""
    with contextlib.redirect_stdout(io.StringIO()):
        _load(TESTS / "tiny/make_tiny.py").make_base(str(folder))
    return AutoTokenizer.from_pretrained(folder)


def sentencepiece() -> Any:
    """As Llama 2 has it: bytes for unknown characters, a space stripped where a text begins."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in tokens[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
