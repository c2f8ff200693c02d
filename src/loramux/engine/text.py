"""Text to tokens and back, by a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from loramux.engine.chat_template import ToolPlaces, read_tool_places
from loramux.engine.grammars import CompiledGrammar, Grammars
from loramux.errors import InvalidRequest
from loramux.guide import Guide

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no whole character, or not yet."""

_MORE_BYTES = 3
"""A UTF-8 character has at most this many bytes after its first one."""

_MOST_SILENT = 64
"""Tokens in a row that come to no text at all; they are not decoded again with those after them."""


class HFText:
    """The engine's TextCodec over ``tokenizer``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Collection[int] = (),
        key: str = "",
    ) -> None:
        """``eos_token_ids`` end a text; there are no guides without."""
        self.key = key
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._grammars = Grammars(tokenizer, self._eos_token_ids)
        self._decode = _decoder_of(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._alone: dict[bool, dict[int, str]] = {False: {}, True: {}}
        """How each token reads by itself, with special ones and without, as far as it came up: half
        of all that is decoded, and the steps wait for it."""
        self._tool_places: dict[str, ToolPlaces] = {}
        """Of each template; a tokenizer may have one for tools and one for all else."""

    def __reduce__(self) -> tuple[Any, ...]:
        return HFText, (self._tokenizer, self._eos_token_ids, self.key)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with the special tokens that the tokenizer adds by itself.

        Raises InvalidRequest for text that UTF-8 cannot hold.
        """
        _check_unicode(text, "prompt")
        # Not verbose: it would warn of long texts; how long they may be is the engine's to judge.
        return _flat_ids(self._tokenizer.encode(text, verbose=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``, byte for byte: spaces are never tidied up."""
        return self._decode(list(token_ids), skip_special_tokens)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, kept: Collection[str] = ()
    ) -> Detokenizer:
        """A fresh one for one completion."""
        skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            skipped = frozenset(i for token, i in self._special.items() if token not in kept)
        # Those that are skipped never come to be decoded, so with some kept all may be shown.
        skip_all = skip_special_tokens and not kept
        alone = self._alone[skip_all]

        def decode(token_ids: list[int]) -> str:
            if len(token_ids) != 1:
                return self.decode(token_ids, skip_special_tokens=skip_all)
            text = alone.get(token_ids[0])
            if text is None:
                text = self.decode(token_ids, skip_special_tokens=skip_all)
                alone[token_ids[0]] = text
            return text

        return Detokenizer(decode, skipped=skipped)

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that stand beside the vocabulary of text, by how they read."""
        return self._added

    @property
    def special_tokens(self) -> Collection[str]:
        """Those of them that texts leave out."""
        return self._special.keys()

    @property
    def tool_template(self) -> str:
        """The literal text in the chat template for conversations with tools; "" without one."""
        return self._places_in_template(with_tools=True).text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Tokens of a conversation that ends where the assistant speaks.

        The text parts of a message are joined by line breaks. Raises InvalidRequest when the model
        has no chat template, the template refuses or has no place for the tools or the calls, or a
        part is no text.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "the model has no chat template: send a prompt to /v1/completions instead",
                "messages",
            )
        self._check_places(messages, tools)
        conversation = [_with_plain_content(message) for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
            )
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {error}", "messages"
            ) from error
        return _flat_ids(ids)

    def compile(self, guide: Guide) -> CompiledGrammar:
        """Raises InvalidRequest for a guide that cannot be followed, or MissingPackage."""
        return self._grammars.compile(guide)

    def warm_up(self) -> None:
        """Take the tokenizer over to llguidance, if that can be."""
        self._grammars.warm_up()

    def _check_places(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise InvalidRequest for what the template would leave out without a word."""
        if tools and not self._places_in_template(with_tools=True).takes_tools:
            raise InvalidRequest(
                "the model's chat template has no place for tools: leave them out, or ask a model "
                "that was trained to call tools",
                "tools",
            )
        calls = any(message.get("tool_calls") for message in messages)
        if calls and not self._places_in_template(with_tools=bool(tools)).takes_calls:
            raise InvalidRequest(
                "the model's chat template has no place for the tool_calls of messages: leave them "
                "out, or ask a model that was trained to call tools",
                "messages",
            )

    def _places_in_template(self, *, with_tools: bool) -> ToolPlaces:
        """Of the template that transformers takes with tools, or without."""
        try:
            template = self._tokenizer.get_chat_template(tools=[] if with_tools else None)
        except ValueError:  # there is none, or none for this case: rendering says so
            return ToolPlaces()
        if template not in self._tool_places:
            self._tool_places[template] = read_tool_places(template)
        return self._tool_places[template]


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int], bool], str]:
    """Tokens, and whether special ones are left out, to text without tidied spaces.

    For most tokenizers straight by the library below transformers, whose own work on the way takes
    ten times as long as decoding one token, and is the same for all of them.
    """
    kind = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    ):
        backend = tokenizer.backend_tokenizer
        return lambda ids, skip: backend.decode(ids, skip_special_tokens=skip)

    def decode(ids: list[int], skip: bool) -> str:
        text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


class Detokenizer:
    """Turns one completion's tokens into text as they come.

    The pieces hold whole characters and concatenate to the decoded text of all tokens. Work per
    token is constant: a token is decoded with the few before it that its text may depend on.

    One case differs: a byte-fallback decoder (SentencePiece) gives up a whole run of byte tokens
    for one broken byte in it, even characters that were complete and shown before; here they stay.
    A U+FFFD that a model spells in such bytes looks broken, too. tokenizers' DecodeStream raises
    in that case, has no way to flush, and knows fast tokenizers only, so it is not used.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], *, skipped: frozenset[int] = frozenset()
    ) -> None:
        """``decode`` gives the text of tokens; ``skipped`` are tokens that it leaves out."""
        self._decode = decode
        self._skipped = skipped
        self._context: list[int] = []
        """The tokens last shown: some tokenizers write a token otherwise where a text begins."""
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The whole characters that ``token_id`` completes, often all of its own."""
        if token_id in self._skipped:
            return ""  # however many come in a row, they never have to be decoded
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.endswith(_UNFINISHED):
            return self._show(len(self._pending), text)
        return self._show_settled(text)

    def finish(self) -> str:
        """What is still held back: the beginning of a character that was never completed."""
        text = self._decode(self._context + self._pending)
        return self._show(len(self._pending), text)

    def _show_settled(self, text: str) -> str:
        """Show pending tokens that no further byte can change, though no character ends here."""
        settled = len(self._pending) - _MORE_BYTES
        if settled <= 0:
            return ""
        head = self._decode(self._context + self._pending[:settled])
        # The bytes after the cut are enough to complete any character that would stand across it.
        if head + self._decode(self._pending[settled:]) != text:
            return ""
        return self._show(settled, head)

    def _show(self, count: int, text: str) -> str:
        """Move ``count`` tokens from pending to context; ``text`` is that of both."""
        shown = self._pending[:count]
        if text.startswith(self._context_text):
            new = text[len(self._context_text) :]
        else:  # a byte-fallback decoder has taken back a character for the broken bytes after it
            new = self._decode(shown)
        if new:  # a context without text would look like the beginning of the text
            self._context, self._pending = shown, self._pending[count:]
            self._context_text = self._decode(self._context)
        elif count > _MOST_SILENT:
            self._pending = self._pending[count:]
        return new


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds half a surrogate pair at character {error.start}: "
            "send text that is valid Unicode",
            param,
        ) from None


def _with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``message`` whose content is a string, where it has one."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list | tuple):
        plain["content"] = content = "\n".join(map(_part_text, content))
    if isinstance(content, str):
        _check_unicode(content, "messages")
    return plain


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise InvalidRequest("messages may hold text only: each part needs type text", "messages")


def _flat_ids(ids: Any) -> list[int]:
    """Token ids out of what tokenizers answer: a list, a batch of one, or a mapping with either."""
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    if len(ids) == 1 and not isinstance(ids[0], int):
        ids = ids[0]
    return [int(token) for token in ids]
