"""Guides by llguidance: what each kind accepts, what is refused, and which tokenizers it takes."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import decoders
from transformers import ByT5Tokenizer

from loramux.engine import grammars
from loramux.engine.adapter_text import AdapterText
from loramux.engine.grammars import Grammars
from loramux.engine.text import HFText
from loramux.errors import InvalidRequest, MissingPackage
from loramux.guide import Grammar, Guide, GuideFailed, Matcher
from tests.cpu.engines import word_tokenizer

BYTE_EOS = 295


@pytest.fixture(scope="module")
def bytes_text(byte_level: Any) -> HFText:
    """Any text; the token 295 ends it."""
    return HFText(byte_level, [BYTE_EOS])


def allows(mask: bytes, token: int) -> bool:
    return token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def token_of(text: HFText, character: str) -> int:
    [token] = text.encode(character)
    return token


def accepts(grammar: Grammar, tokens: list[int], eos: int) -> bool:
    """Whether an answer of these tokens may be given and may end there."""
    matcher = grammar.matcher()
    for place, token in enumerate(tokens):
        if not allows(matcher.allowed, token):
            return False
        if matcher.push(token):
            return place == len(tokens) - 1
    return allows(matcher.allowed, eos)


def accepted(text: HFText, guide: Guide, answers: list[str]) -> list[bool]:
    grammar = text.compile(guide)
    return [accepts(grammar, text.encode(answer), BYTE_EOS) for answer in answers]


def allowed_tokens(text: HFText, matcher: Matcher) -> list[str]:
    found = [token for token in range(300) if allows(matcher.allowed, token)]
    return sorted(text.decode([token], skip_special_tokens=False) for token in found)


def test_a_schema_accepts_what_it_describes(bytes_text: HFText) -> None:
    guide = Guide.json(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    good = ['{"a":1}', '{"a": -12, "b": "é"}', '{\n  "a": 1,\n  "b": "x"\n}']
    bad = ['{"a":"1"}', '{"b":"x"}', '{"a":1,"c":2}', '{"a":1} ', '{"a":1', "[]", ""]
    assert accepted(bytes_text, guide, good + bad) == [True] * len(good) + [False] * len(bad)


def test_white_space_in_json_ends(bytes_text: HFText) -> None:
    guide = Guide.json({"type": "array", "items": {"type": "null"}})
    good, bad = ["[ null ]", "[\n" + 20 * " " + "null]"], ["[  null]", "[\n\nnull]"]
    assert accepted(bytes_text, guide, good + bad) == [True, True, False, False]


def test_a_regex_matches_the_whole_answer(bytes_text: HFText) -> None:
    guide = Guide.regex(r"[0-9]{2}(-x)?")
    answers = ["12", "12-x", "1", "123", "a12", "12-", ""]
    assert accepted(bytes_text, guide, answers) == [True, True] + [False] * 5


CHOICES = [
    "yes", "no", "no way", "it's", 'q"x', "back\\slash", "a\nb", "\t", "\x00", "\x7f", "😀", "/re/",
    "$(x)", "é", "\u2028", "start", "|",
]  # fmt: skip


def test_a_choice_accepts_each_text_as_it_is_and_no_other(bytes_text: HFText) -> None:
    guide = Guide.choice(CHOICES)
    others = ["", "ye", "yes ", "Yes", "no wa", "\\", "\\n"]
    wanted = [True] * len(CHOICES) + [False] * len(others)
    assert accepted(bytes_text, guide, CHOICES + others) == wanted


def test_a_grammar_accepts_its_language(bytes_text: HFText) -> None:
    guide = Guide.grammar('start: "a" start "b" | "ab"')
    assert (
        accepted(bytes_text, guide, ["ab", "aaabbb", "aab", "", "ba"]) == [True] * 2 + [False] * 3
    )


def test_an_answer_that_nothing_can_follow_is_complete(bytes_text: HFText) -> None:
    matcher = bytes_text.compile(Guide.choice(["ab", "ac"])).matcher()
    assert not matcher.push(token_of(bytes_text, "a"))
    assert allowed_tokens(bytes_text, matcher) == ["b", "c"]
    assert matcher.push(token_of(bytes_text, "c"))


def test_an_end_may_come_only_where_the_answer_is_complete(bytes_text: HFText) -> None:
    matcher = bytes_text.compile(Guide.choice(["a", "ab"])).matcher()
    assert not allows(matcher.allowed, BYTE_EOS)
    assert not matcher.push(token_of(bytes_text, "a"))
    found = [token for token in range(300) if allows(matcher.allowed, token)]
    assert found == [token_of(bytes_text, "b"), BYTE_EOS]


def test_every_end_of_text_may_come(byte_level: Any) -> None:
    matcher = HFText(byte_level, [295, 296]).compile(Guide.regex("a*")).matcher()
    assert [t for t in range(290, 300) if allows(matcher.allowed, t)] == [295, 296]


def test_matchers_of_one_grammar_go_their_own_ways(bytes_text: HFText) -> None:
    grammar = bytes_text.compile(Guide.choice(["ab", "cd"]))
    one, other = grammar.matcher(), grammar.matcher()
    one.push(token_of(bytes_text, "a"))
    assert allowed_tokens(bytes_text, one) == ["b"]
    assert allowed_tokens(bytes_text, other) == ["a", "c"]
    assert allowed_tokens(bytes_text, grammar.matcher()) == ["a", "c"]


def test_a_token_that_is_not_allowed_fails(bytes_text: HFText) -> None:
    matcher = bytes_text.compile(Guide.choice(["ab"])).matcher()
    with pytest.raises(GuideFailed):
        matcher.push(token_of(bytes_text, "x"))


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        (Guide.json({"type": "strng"}, "it"), "Invalid type: strng"),
        (Guide.json({"if": {"type": "string"}}, "it"), 'Unimplemented keys: ["if"]'),
        (Guide.json({"$ref": "http://x/y"}, "it"), "does not fetch"),
        (Guide.json({"$ref": "#"}, "it"), "no token"),
        (Guide.json({"enum": []}, "it"), "Unsatisfiable"),
        (Guide.json({"type": "string", "pattern": "(a"}, "it"), "unclosed group"),
        (Guide.json('{"items":' * 300 + "{}" + "}" * 300, "it"), "recursion limit"),
        (Guide.regex("(a", "it"), "unclosed group"),
        (Guide.regex("(" * 4000 + ")" * 4000, "it"), "number of nested parentheses"),
        (Guide.regex(r"(?=a)b", "it"), "look-around"),
        (Guide.regex(r"\bfoo", "it"), "lookarounds not supported"),
        (Guide.grammar("start: foo", "it"), 'unknown name: "foo"'),
        (Guide.grammar("hello", "it"), "Expected token"),
        (Guide.grammar("start: " + "(" * 5000, "it"), "too deeply nested"),
    ],
    ids=lambda value: value.text[:24] if isinstance(value, Guide) else value,
)
def test_what_llguidance_refuses_is_an_invalid_request(
    bytes_text: HFText, guide: Guide, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)) as refused:
        bytes_text.compile(guide)
    assert refused.value.param == "it"
    assert str(refused.value).startswith("it cannot be followed: ")
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


def chained(count: int, link: Callable[[str], str]) -> Guide:
    """A schema whose definitions lead from one to the next."""
    definitions = [f'"{i}":{link(json.dumps({"$ref": f"#/$defs/{i + 1}"}))}' for i in range(count)]
    return Guide.json(f'{{"$ref":"#/$defs/0","$defs":{{{",".join(definitions)},"{count}":true}}}}')


@pytest.mark.parametrize(
    "guide",
    [
        chained(1350, lambda ref: f'{{"items":{ref}}}'),
        chained(1100, lambda ref: f'{{"properties":{{"a":{ref}}}}}'),
        chained(1200, lambda ref: f'{{"prefixItems":[{ref}]}}'),
        chained(50, lambda ref: '{"items":' * 110 + ref + "}" * 110),
        Guide.grammar(
            "start: a0\n" + "".join(f'a{i}: "x" a{i + 1}\n' for i in range(850)) + 'a850: "y"'
        ),
    ],
    ids=["items", "properties", "prefixItems", "nested", "rules"],
)
def test_a_long_chain_of_definitions_does_not_overflow_the_stack(
    bytes_text: HFText, guide: Guide
) -> None:
    """In an ordinary thread some of these end the process. To follow them is safe in any."""
    matcher = bytes_text.compile(guide).matcher()

    def follow() -> None:
        for _ in range(50):
            token = next(t for t in range(256) if allows(matcher.allowed, t))
            if matcher.push(token):
                break

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join()
    assert any(matcher.allowed)


def test_the_size_of_other_stacks_stays(bytes_text: HFText) -> None:
    before = threading.stack_size()
    bytes_text.compile(Guide.regex("stack"))
    assert threading.stack_size() == before


def test_a_guide_is_compiled_once(byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Guide] = []
    compile_ = grammars._compile

    def counting(vocabulary: Any, guide: Guide) -> Any:
        compiled.append(guide)
        return compile_(vocabulary, guide)

    monkeypatch.setattr(grammars, "_compile", counting)
    known = Grammars(byte_level, [BYTE_EOS])
    first = known.compile(Guide.regex("a"))
    assert known.compile(Guide.regex("a", "other")) is first
    for i in range(grammars.CACHED):
        known.compile(Guide.regex("b" * (i + 1)))
        known.compile(Guide.regex("a"))  # used last, so it stays
    assert len(compiled) == 1 + grammars.CACHED
    known.compile(Guide.regex("b"))  # used the longest ago, so it is gone
    assert len(compiled) == 2 + grammars.CACHED


def test_the_vocabulary_is_built_once(byte_level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = grammars._vocabulary
    monkeypatch.setattr(
        grammars, "_vocabulary", lambda *given: built.append(given) or build(*given)
    )
    known = Grammars(byte_level, [BYTE_EOS])
    guides = [Guide.regex("a" * (i + 1)) for i in range(8)]
    threads = [threading.Thread(target=known.compile, args=[guide]) for guide in guides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_characters_have_tokens_of_their_own(tiny: Any) -> None:
    """A tokenizer without bytes, which llguidance cannot read by itself."""
    grammar = HFText(tiny, [3]).compile(Guide.regex("the [a-z]{3}( on)?"))
    answers = ["the cat", "the cat on", "the ca", "a cat"]
    found = [accepts(grammar, tiny.encode(answer), 3) for answer in answers]
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    "guide", [Guide.choice(["é"]), Guide.regex("☃+"), Guide.json('{"enum":["a"]}')]
)
def test_what_no_token_can_begin_is_refused(tiny: Any, guide: Guide) -> None:
    """It has neither é nor a snowman nor a quote, and its unknown token stands for none of them."""
    with pytest.raises(InvalidRequest, match="no token of the model's vocabulary"):
        HFText(tiny, [3]).compile(guide)


def test_what_no_token_can_go_on_with_fails_on_the_way(tiny: Any) -> None:
    matcher = HFText(tiny, [3]).compile(Guide.regex("[ab]é")).matcher()
    [token] = tiny.encode("a")
    with pytest.raises(GuideFailed, match="no token of the model's vocabulary"):
        matcher.push(token)


def test_bytes_stand_in_for_characters_that_have_no_token(sentencepiece: Any) -> None:
    grammar = HFText(sentencepiece, [2]).compile(Guide.choice(["a☃"]))
    tokens = sentencepiece.convert_tokens_to_ids(["a", "<0xE2>", "<0x98>", "<0x83>"])
    assert accepts(grammar, tokens, 2)


def test_words_are_tokens() -> None:
    grammar = HFText(word_tokenizer(160), [2]).compile(Guide.regex("1+"))
    assert [accepts(grammar, ids, 2) for ids in ([1], [11, 1], [12], [])] == [
        True,
        True,
        False,
        False,
    ]


def test_an_end_that_the_tokenizer_does_not_know_is_none(byte_level: Any) -> None:
    HFText(byte_level, [BYTE_EOS, 5000]).compile(Guide.regex("a"))
    for ends in ([], [5000]):
        with pytest.raises(InvalidRequest, match="no token that ends a text"):
            HFText(byte_level, ends).compile(Guide.regex("a"))


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    text = HFText(ByT5Tokenizer(), [1])
    with pytest.raises(InvalidRequest, match="ByT5Tokenizer is not one of") as refused:
        text.compile(Guide.regex("a", "guided_regex"))
    assert refused.value.param == "guided_regex"


def test_a_decoder_that_llguidance_does_not_know_is_refused() -> None:
    tokenizer = word_tokenizer(9)
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequest, match="decoder"):
        HFText(tokenizer, [2]).compile(Guide.regex("a"))


def test_a_panic_in_a_tokenizer_is_a_refusal(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    def panic(*given: Any, **how: Any) -> None:
        raise PanicException("index out of range")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", panic)
    text = AdapterText(byte_level, 300, [BYTE_EOS])
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="index out of range"):
            text.compile(Guide.regex("a"))


@pytest.mark.parametrize("kind", [HFText, lambda *given: AdapterText(given[0], 300, given[1])])
def test_without_llguidance_a_guide_says_what_to_install(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    text = kind(byte_level, [BYTE_EOS])
    assert text.encode("a")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(MissingPackage, match="pip install llguidance"):
            text.compile(Guide.regex("a"))
    text.compile(Guide.regex("a"))  # it can be installed meanwhile


def test_a_tokenizer_can_be_taken_over_before_the_first_guide(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = HFText(byte_level, [BYTE_EOS])
    codec.warm_up()
    monkeypatch.setattr(grammars, "_vocabulary", None)  # it is not needed any more
    tokens = [token_of(codec, character) for character in "ab"]
    assert accepts(codec.compile(Guide.regex("ab")), tokens, BYTE_EOS)


def test_what_is_in_the_way_of_guides_shows_at_the_first_one(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    codec = HFText(byte_level, [BYTE_EOS])
    codec.warm_up()
    with pytest.raises(MissingPackage):
        codec.compile(Guide.regex("ab"))
