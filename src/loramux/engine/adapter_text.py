"""The tokenizer in an adapter's folder: files of a stranger, so bounded, and of no code."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from loramux.adapters.formats.files import MalformedFile, parse_json_object, read_bounded
from loramux.adapters.remotes.remote import TOKENIZER_FILES
from loramux.engine.languages import Language
from loramux.engine.text import HFText
from loramux.errors import AdapterRefused, InvalidRequest

log = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 64 * 2**20
MAX_OTHER_BYTES = 4 * 2**20

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_ADDED = "added_tokens.json"
_PLACES = re.compile(r".*_(file|path)|vocab|merges")
"""Settings that could have other files read than those of the folder."""
_NO_TOKENIZER = (
    "it has more tokens than the base and no tokenizer.json in its folder: the added tokens have "
    "no text, and no text becomes one of them"
)


class LanguageReader:
    """Reads tokenizers of adapters; what they do not say is as with the base's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        """``tokenizer`` is the base's, and ``eos_token_ids`` end its texts."""
        self._base = tokenizer
        self._eos_token_ids = eos_token_ids

    def read(self, name: str, directory: Path, vocab_size: int) -> Language:
        """The language of an adapter with more tokens than the base, in any thread.

        Raises AdapterRefused for a tokenizer that cannot be used.
        """
        with _refusal(name):
            files = _read_files(directory)
            if not files:
                key = _key("", vocab_size)
                text = AdapterText(self._base, vocab_size, self._eos_token_ids, key)
                return Language(text, self._eos_token_ids, warnings=(_NO_TOKENIZER,))
            tokenizer = _load(files)
            _check(tokenizer, vocab_size)
            tokenizer.chat_template = tokenizer.chat_template or self._base.chat_template
            eos = tokenizer.eos_token_id
            ends = self._eos_token_ids | ({eos} if isinstance(eos, int) else set())
            digest = _digest(files)
            text = AdapterText(tokenizer, vocab_size, ends, _key(digest, vocab_size))
        return Language(text, ends, digest)


class AdapterText(HFText):
    """Text by a tokenizer that is for one adapter: what it fails at harms nobody else."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        key: str = "",
    ) -> None:
        super().__init__(tokenizer, eos_token_ids, key)
        self._vocab_size = vocab_size
        self._known = min(vocab_size, _num_ids(tokenizer))
        self._has_failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        made_of = (self._tokenizer, self._vocab_size, self._eos_token_ids, self.key)
        return AdapterText, made_of

    def encode(self, text: str) -> list[int]:
        with _invalid("prompt"):
            return super().encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Tokens without text are left out, and so is what the tokenizer fails at."""
        known = [token for token in token_ids if token < self._known]
        try:
            return super().decode(known, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            _raise_unless_of_tokenizer(error)
            if not self._has_failed:
                log.warning("an adapter's tokenizer fails at its tokens, whose text is lost")
                self._has_failed = True
            return ""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        with _invalid("messages"):
            return super().render_chat(messages, tools)


def _read_files(directory: Path) -> dict[str, bytes]:
    """The files of a tokenizer, none without the one that has the tokens. Raises MalformedFile."""
    if not (directory / _TOKENIZER).exists():
        return {}
    found: dict[str, bytes] = {}
    for name in TOKENIZER_FILES:
        if not (directory / name).exists():
            continue
        limit = MAX_TOKENIZER_BYTES if name == _TOKENIZER else MAX_OTHER_BYTES
        found[name] = read_bounded(directory / name, limit)
        if name not in (_TOKENIZER, _TEMPLATE):
            fields = parse_json_object(name, found[name])
            if name != _ADDED:  # whose fields are tokens
                found[name] = json.dumps(_harmless(name, fields)).encode()
    return found


def _harmless(file: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer's settings without what leads out of its folder. Raises MalformedFile."""
    if settings.get("auto_map"):
        raise MalformedFile(
            f"{file} names code of its own (auto_map), which is never run: save the tokenizer "
            "as one of transformers' own classes"
        )
    return {name: value for name, value in settings.items() if not _PLACES.fullmatch(name)}


def _load(files: Mapping[str, bytes]) -> PreTrainedTokenizerBase:
    """A tokenizer of these files and no others."""
    with tempfile.TemporaryDirectory(prefix="loramux-tokenizer-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        if _CONFIG not in files:
            return PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / _TOKENIZER))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Try it, so that most of what is broken shows now. Raises MalformedFile."""
    if not tokenizer.is_fast:
        raise MalformedFile(f"{_CONFIG} names a class that does not read {_TOKENIZER}")
    num_ids = _num_ids(tokenizer)
    if num_ids > vocab_size:
        raise MalformedFile(
            f"{_TOKENIZER} has tokens up to {num_ids - 1}, the adapter's vocabulary has "
            f"{vocab_size}: save the tokenizer that the adapter was trained with"
        )
    tokenizer.decode(tokenizer.encode("a b"))


def _num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return digest.hexdigest()


def _key(digest: str, vocab_size: int) -> str:
    """What a codec hangs on beside the base."""
    return f"{digest} {vocab_size}"


@contextmanager
def _refusal(name: str) -> Iterator[None]:
    """Whatever goes wrong refuses the adapter; no message holds content of a file."""
    try:
        yield
    except MalformedFile as problem:
        raise AdapterRefused(name, [str(problem)]) from None
    except BaseException as error:
        _raise_unless_of_tokenizer(error)
        raise AdapterRefused(
            name,
            [
                f"the tokenizer in its folder cannot be used ({type(error).__name__}): save it "
                "again with save_pretrained, or take its files away"
            ],
        ) from error


@contextmanager
def _invalid(param: str) -> Iterator[None]:
    """Whatever goes wrong refuses the request."""
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        _raise_unless_of_tokenizer(error)
        raise InvalidRequest(
            f"the adapter's tokenizer fails at this text ({type(error).__name__})", param
        ) from error


def _raise_unless_of_tokenizer(error: BaseException) -> None:
    """Panics of a tokenizer's native code are no Exception; what ends a process goes on."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
