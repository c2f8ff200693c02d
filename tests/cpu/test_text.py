"""Text to tokens and back, over three kinds of tokenizers."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from loramux.engine.text import Detokenizer, HFText
from loramux.errors import InvalidRequest
from tests.cpu.engines import word_tokenizer
from tests.cpu.tokenizers_of_kinds import WORDS


def pieces(tokenizer: Any, ids: list[int], *, skip: bool = True) -> list[str]:
    """What each token shows, and last what the end shows."""
    detokenizer = HFText(tokenizer).detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def ids_of(tokenizer: Any, tokens: list[str]) -> list[int]:
    return tokenizer.convert_tokens_to_ids(tokens)


def utf8_tokens(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


def test_a_tokenizer_with_a_way_of_its_own_to_decode_is_asked_for_it() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    backend = word_tokenizer(9).backend_tokenizer
    backend.add_tokens(["word"])
    plain, loud = (cls(tokenizer_object=backend) for cls in (PreTrainedTokenizerFast, Loud))
    assert (HFText(plain).decode([9]), HFText(loud).decode([9])) == ("word", "WORD")
    detokenizer = HFText(loud).detokenizer()
    assert detokenizer.push(9) + detokenizer.finish() == "WORD"


@pytest.mark.parametrize("kind", ["byte_level", "tiny", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_is_that_of_transformers(
    request: pytest.FixtureRequest, kind: str, skip: bool
) -> None:
    tokenizer = request.getfixturevalue(kind)
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(9))]
        expected = tokenizer.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert HFText(tokenizer).decode(ids, skip_special_tokens=skip) == expected


@given(ids=st.lists(st.integers(0, 299)), skip=st.booleans())
def test_byte_level_pieces_concatenate_to_the_decoded_text(
    byte_level: Any, ids: list[int], skip: bool
) -> None:
    found = pieces(byte_level, ids, skip=skip)
    assert "".join(found) == byte_level.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 1023)), skip=st.booleans())
def test_tiny_pieces_concatenate_to_the_decoded_text(tiny: Any, ids: list[int], skip: bool) -> None:
    found = pieces(tiny, ids, skip=skip)
    assert "".join(found) == tiny.decode(ids, skip_special_tokens=skip)


utf8_parts = st.sampled_from(
    [b"\xc3", b"\xa9", b"\xa9\xc3", b"\xf0\x9f", b"\x98", b"\x80\xf0", b"\x80", b"\xff", b"a"]
)


@given(tokens=st.lists(utf8_parts))
def test_tokens_may_hold_any_parts_of_characters(tokens: list[bytes]) -> None:
    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    every = range(len(tokens))
    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.push, every)) + detokenizer.finish() == decode(every)


@pytest.mark.parametrize("token", ["a", "▁Hello", "<0x80>", "</s>"])
def test_work_per_token_is_constant(sentencepiece: Any, token: str) -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return sentencepiece.decode(ids, skip_special_tokens=True)

    detokenizer = Detokenizer(decode, skipped=frozenset(ids_of(sentencepiece, ["</s>"])))
    for token_id in ids_of(sentencepiece, ["a", *[token] * 200]):
        detokenizer.push(token_id)
    assert max(decoded) <= 8


sentencepiece_text = st.lists(
    st.sampled_from(["<unk>", "</s>", *WORDS]).map(lambda token: [token])
    | st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}").map(utf8_tokens)
).map(lambda parts: [token for part in parts for token in part])


@given(tokens=sentencepiece_text, skip=st.booleans())
def test_sentencepiece_pieces_concatenate_to_the_decoded_text(
    sentencepiece: Any, tokens: list[str], skip: bool
) -> None:
    ids = ids_of(sentencepiece, tokens)
    found = pieces(sentencepiece, ids, skip=skip)
    assert "".join(found) == sentencepiece.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}")))
def test_valid_text_is_shown_in_whole_characters(byte_level: Any, text: str) -> None:
    ids = byte_level.encode(text)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces(byte_level, ids)[:-1])


@given(ids=st.lists(st.integers(0, 255), min_size=1))
def test_at_most_the_last_tokens_are_held_back(byte_level: Any, ids: list[int]) -> None:
    detokenizer = HFText(byte_level).detokenizer()
    shown = "".join(map(detokenizer.push, ids))
    assert len(byte_level.decode(ids)) - len(shown) <= 4


def test_an_emoji_of_several_tokens_comes_with_its_last_one(byte_level: Any) -> None:
    ids = byte_level.encode("a😀b")
    assert len(ids) == 6
    assert pieces(byte_level, ids) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_never_completed_is_shown_at_the_end(byte_level: Any) -> None:
    ids = byte_level.encode("a😀")[:-1]
    assert pieces(byte_level, ids) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_run_of_broken_bytes_is_not_held_back_as_a_whole(byte_level: Any) -> None:
    broken = byte_level.encode("é")[1]
    found = pieces(byte_level, [broken] * 10)
    assert found[:-1] == [""] * 3 + ["\N{REPLACEMENT CHARACTER}"] * 7


def test_ordinary_text_is_shown_token_by_token(tiny: Any) -> None:
    ids = tiny.encode("Alice was beginning to")
    assert pieces(tiny, ids) == [*(tiny.decode([token]) for token in ids), ""]


def test_only_the_space_that_begins_a_text_is_stripped(sentencepiece: Any) -> None:
    ids = ids_of(sentencepiece, ["▁Hello", "▁world", "▁", "▁world"])
    assert pieces(sentencepiece, ids) == ["Hello", " world", " ", " world", ""]


def test_a_skipped_token_does_not_look_like_the_beginning_of_a_text(sentencepiece: Any) -> None:
    ids = ids_of(sentencepiece, ["▁Hello", "</s>", "▁world"])
    assert pieces(sentencepiece, ids) == ["Hello", "", " world", ""]


def test_special_tokens_can_be_shown(sentencepiece: Any) -> None:
    ids = ids_of(sentencepiece, ["▁Hello", "</s>", "▁world"])
    assert pieces(sentencepiece, ids, skip=False) == ["Hello", "</s>", " world", ""]


def test_a_token_without_text_does_not_look_like_the_beginning_of_a_text(
    sentencepiece: Any,
) -> None:
    hello, world = ids_of(sentencepiece, ["▁Hello", "▁world"])
    outside = len(sentencepiece) + 5
    assert pieces(sentencepiece, [hello, outside, world]) == ["Hello", "", " world", ""]


def test_a_broken_byte_does_not_take_back_what_was_shown(sentencepiece: Any) -> None:
    ids = ids_of(sentencepiece, [*utf8_tokens("é"), "<0xFF>", "!"])
    assert pieces(sentencepiece, ids) == ["", "é", "", "\N{REPLACEMENT CHARACTER}!", ""]


@pytest.mark.parametrize("text", ["Alice was", "  two  spaces ", "", "don 't , ok ."])
def test_decoding_gives_the_encoded_text_back(byte_level: Any, text: str) -> None:
    codec = HFText(byte_level)
    assert codec.decode(codec.encode(text)) == text


def test_spaces_stay_though_the_tokenizer_wants_to_tidy_them(byte_level: Any) -> None:
    tidy = type(byte_level)(
        tokenizer_object=byte_level.backend_tokenizer,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    ids = tidy.encode("do n't , ok .")
    assert tidy.decode(ids) == "don't, ok."
    assert HFText(tidy).decode(ids) == "do n't , ok ."
    assert "".join(pieces(tidy, ids)) == "do n't , ok ."


def test_decoding_shows_special_tokens_on_request(byte_level: Any) -> None:
    codec = HFText(byte_level)
    ids = codec.encode("a<|im_end|>")
    assert codec.decode(ids) == "a"
    assert codec.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


def test_encoding_half_a_surrogate_pair_is_refused(byte_level: Any) -> None:
    with pytest.raises(InvalidRequest, match="character 1") as caught:
        HFText(byte_level).encode("a\ud83d")
    assert caught.value.param == "prompt"


def rendered(tokenizer: Any, *messages: dict[str, Any]) -> str:
    return tokenizer.decode(HFText(tokenizer).render_chat(messages))


def test_a_chat_is_rendered_up_to_where_the_assistant_speaks(byte_level: Any) -> None:
    found = rendered(byte_level, {"role": "user", "content": "Hi"})
    assert found == "<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined_by_line_breaks(byte_level: Any) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = rendered(byte_level, {"role": "user", "content": parts})
    assert "<|im_start|>user\none\ntwo<|im_end|>" in found


def test_rendering_leaves_the_messages_alone(byte_level: Any) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "one"}]}
    HFText(byte_level).render_chat([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "one"}]}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text"},
        {"type": "text", "text": 3},
        "text",
    ],
    ids=str,
)
def test_a_part_that_is_no_text_is_refused(byte_level: Any, part: Any) -> None:
    with pytest.raises(InvalidRequest, match="text only") as caught:
        HFText(byte_level).render_chat([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_in_a_message_is_refused(byte_level: Any) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        HFText(byte_level).render_chat([{"role": "user", "content": "\ud83d"}])


def test_a_model_without_chat_template_refuses_chats(tiny: Any) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        HFText(tiny).render_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + 3 }}", "concatenate"),
        ("{{ nothing.here }}", "undefined"),
    ],
)
def test_a_template_that_refuses_is_the_requests_fault(
    byte_level: Any, template: str, reason: str
) -> None:
    tokenizer = type(byte_level)(tokenizer_object=byte_level.backend_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match=reason) as caught:
        HFText(tokenizer).render_chat([{"role": "user", "content": None}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "answer", [[5, 6], [[5, 6]], {"input_ids": [5, 6]}, {"input_ids": [[5, 6]]}]
)
def test_every_form_in_which_tokenizers_return_ids_is_understood(
    byte_level: Any, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(byte_level, "apply_chat_template", lambda *_, **__: answer)
    assert HFText(byte_level).render_chat([{"role": "user", "content": "Hi"}]) == [5, 6]


def test_long_texts_are_encoded_without_a_warning(
    byte_level: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_level, "model_max_length", 5)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    codec = HFText(byte_level)
    assert len(codec.encode("a" * 20)) == 20
    codec.render_chat([{"role": "user", "content": "a" * 20}])
    assert caplog.messages == []
    byte_level.encode("a" * 20)
    assert "longer than" in caplog.text


@pytest.mark.parametrize("skip", [False, True])
def test_a_codec_is_the_same_in_another_process(
    byte_level: PreTrainedTokenizerFast, sentencepiece: PreTrainedTokenizerFast, skip: bool
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        codec = HFText(tokenizer, [2], "its key")
        there = pickle.loads(pickle.dumps(codec))
        ids = codec.encode("a b é ☃\n")
        assert there.encode("a b é ☃\n") == ids
        assert there.decode(ids, skip_special_tokens=skip) == codec.decode(
            ids, skip_special_tokens=skip
        )
        assert there.key == "its key"
