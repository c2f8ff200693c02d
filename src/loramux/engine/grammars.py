"""Guides made ready for one tokenizer, by llguidance.

llguidance is imported at the first guide: all else works without it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from loramux.errors import InvalidRequest, MissingPackage
from loramux.guide import JSON_WHITESPACE, Guide, GuideFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

T = TypeVar("T")

CACHED = 32
"""Grammars kept for each tokenizer, those used last."""

_STACK_BYTES = 256 * 2**20
"""llguidance recurses over definitions: 64 KiB of them overflow the stack of an ordinary thread,
which ends the process. Only what is used of it takes memory."""

_STACK_SIZE = threading.Lock()
"""Held while the size of new stacks, which is the process's, is another."""

_MAX_MESSAGE = 300
"""Characters of what llguidance says."""


class Grammars:
    """The grammars of one tokenizer, with a cache; for any thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] = ()
    ) -> None:
        """``eos_token_ids`` end a text."""
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocabulary: LLTokenizer | str | None = None
        self._building = threading.Lock()
        self._cache: OrderedDict[Guide, CompiledGrammar] = OrderedDict()
        self._caching = threading.Lock()

    def compile(self, guide: Guide) -> CompiledGrammar:
        """A guide's grammar. May take a second, so not for the thread that makes steps.

        Raises InvalidRequest for what llguidance refuses, the tokenizer included, and
        MissingPackage where there is no llguidance.
        """
        with self._caching:
            grammar = self._cache.get(guide)
            if grammar is not None:
                self._cache.move_to_end(guide)
                return grammar
        vocabulary = self._find_vocabulary(guide.param)
        grammar = _on_deep_stack(lambda: _compile(vocabulary, guide))
        with self._caching:
            self._cache[guide] = grammar
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return grammar

    def warm_up(self) -> None:
        """Take the tokenizer over now, which holds the interpreter for a quarter of a second where
        there are 50,000 tokens. What is in the way shows at the first guide."""
        with contextlib.suppress(InvalidRequest, MissingPackage):
            self._find_vocabulary("guide")

    def _find_vocabulary(self, param: str) -> LLTokenizer:
        """The tokenizer as llguidance has it, built once; what has failed once fails again."""
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._eos_token_ids)
        if isinstance(self._vocabulary, str):
            raise InvalidRequest(
                f"{param} cannot be had with this model, whose tokenizer llguidance cannot take: "
                f"{self._vocabulary}",
                param,
            )
        return self._vocabulary


class CompiledGrammar:
    """Implements ``guide.Grammar``."""

    def __init__(self, start: LLMatcher, allowed: bytes) -> None:
        """``start`` has taken no token, and ``allowed`` are the first ones."""
        self._start = start
        self._allowed = allowed

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._allowed)


class GrammarMatcher:
    """Implements ``guide.Matcher``."""

    def __init__(self, matcher: LLMatcher, allowed: bytes) -> None:
        self._matcher = matcher
        self._allowed = allowed

    @property
    def allowed(self) -> bytes:
        return self._allowed

    def push(self, token_id: int) -> bool:
        if not self._matcher.consume_token(token_id):
            raise GuideFailed(_short(_problem(self._matcher)))
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return True
        self._allowed = _mask(self._matcher)
        return False


def _compile(vocabulary: LLTokenizer, guide: Guide) -> CompiledGrammar:
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(vocabulary, _definition(guide), log_level=0, limits=_limits())
        if matcher.is_error():
            raise GuideFailed(_problem(matcher))
        # What is too complex, or no token can begin, shows here; and the first step need not wait.
        allowed = _mask(matcher)
    except (GuideFailed, ValueError) as error:
        raise InvalidRequest(
            f"{guide.param} cannot be followed: {_short(str(error))}", guide.param
        ) from None
    return CompiledGrammar(matcher, allowed)


def _definition(guide: Guide) -> str:
    """The grammar as llguidance takes it. Raises ValueError."""
    from llguidance import LLMatcher

    if guide.kind == "json":
        defaults: Any = {"whitespace_pattern": JSON_WHITESPACE}
        return LLMatcher.grammar_from_json_schema(guide.text, defaults=defaults)
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind == "choice":
        # Strings of Lark are those of JSON, but for characters that stand for themselves.
        choices = " | ".join(json.dumps(choice) for choice in guide.choices())
        choices = choices.replace("\x7f", r"\u007f")
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(guide.text)


def _limits() -> LLParserLimits:
    """llguidance's own, but for the states of a lexer, of which each takes 1 to 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _mask(matcher: LLMatcher) -> bytes:
    """The tokens that may come next. Raises GuideFailed where there are none."""
    allowed = matcher.compute_bitmask()
    if matcher.is_error():
        raise GuideFailed(_problem(matcher))
    if not any(allowed):
        raise GuideFailed(_NO_TOKEN)
    return allowed


_NO_TOKEN = "no token of the model's vocabulary goes on as it demands"


def _problem(matcher: LLMatcher) -> str:
    said = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return _NO_TOKEN if said in ("", "NoExtensionBias") else said


def _short(message: str) -> str:
    """The part of a message that tells what is wrong, without the grammar that it repeats."""
    _, found, reason = message.rpartition("error: ")
    line = (reason if found else message).strip().split("\n", 1)[0]
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + " …"


def _vocabulary(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]
) -> LLTokenizer | str:
    """A tokenizer as llguidance has it, or why not. Raises MissingPackage."""
    try:
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise MissingPackage("llguidance", "answers by a schema or a grammar need it") from None
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return f"{type(tokenizer).__name__} is not one of the tokenizers library"
    backend = tokenizer.backend_tokenizer
    ends = [token for token in sorted(eos_token_ids) if token < _num_ids(backend)]
    if not ends:
        return "it has no token that ends a text"
    try:
        if _writes_token_by_token(backend):
            table: Any = _TokenTable(tokenizer, ends)
            return LLTokenizer(table, eos_token=[*ends])
        return from_tokenizer(tokenizer, eos_token=[*ends])
    except BaseException as error:
        # Panics of native code are no Exception; what ends a process goes on.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return _short(str(error))


def _writes_token_by_token(backend: Tokenizer) -> bool:
    """Whether each token has a text of its own, and a text is those of its tokens, joined.

    llguidance reads decoders that end in bytes by itself; these it does not know.
    """
    decoder = json.loads(backend.to_str())["decoder"]
    if decoder is None:
        return False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    return kinds[-1] == "Fuse" and set(kinds[:-1]) <= {"Replace"}


def _num_ids(backend: Tokenizer) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class _TokenTable:
    """A tokenizer whose tokens have texts of their own, with what ``LLTokenizer`` asks for."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, ends: list[int]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.is_tokenizer_wrapper = True
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        added = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        self.special_token_ids = sorted(special | set(ends))
        self.tokens = [
            self._bytes_of(token, token in added) for token in range(_num_ids(self._backend))
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that the grammar forces; none where they would stand for another text,
        as tokens for what is unknown do: it is written token by token then."""
        wanted = text.encode() if isinstance(text, str) else text
        ids = self._backend.encode(wanted.decode(errors="replace"), add_special_tokens=False).ids
        return ids if b"".join(self.tokens[i] for i in ids) == wanted else []

    def _bytes_of(self, token_id: int, is_added: bool) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        decoder = self._backend.decoder
        return (piece if is_added or decoder is None else decoder.decode([piece])).encode()


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own and wait for it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="loramux-grammar")
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
