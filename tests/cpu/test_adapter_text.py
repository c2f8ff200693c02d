"""Tokenizers in the folders of adapters: what they change, and what a hostile one cannot."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from loramux.engine import adapter_text
from loramux.engine.adapter_text import AdapterText, LanguageReader
from loramux.engine.languages import Language
from loramux.errors import AdapterRefused, InvalidRequest
from tests.cpu.engines import word_tokenizer

VOCAB, GROWN = 160, 165
BASE_TEMPLATE = "{% for m in messages %}1 {{ m.content }} {% endfor %}2"


def added(token_id: int) -> str:
    return f"<t{token_id}>"


def grown_tokenizer(eos: int = 164) -> PreTrainedTokenizerFast:
    """The base's words, and ``<t160>`` to ``<t164>``."""
    tokenizer = word_tokenizer(VOCAB)
    tokens = [AddedToken(added(i), special=i == eos, normalized=False) for i in range(VOCAB, GROWN)]
    tokenizer.add_tokens(tokens)
    tokenizer.eos_token = added(eos)
    return tokenizer


@pytest.fixture
def base() -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer(VOCAB)
    tokenizer.chat_template = BASE_TEMPLATE
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an adapter, with a tokenizer as transformers saves it."""
    grown_tokenizer().save_pretrained(tmp_path / "a")
    return tmp_path / "a"


def read(base: PreTrainedTokenizerFast, folder: Path, vocab_size: int = GROWN) -> Language:
    return LanguageReader(base, frozenset({2})).read("a", folder, vocab_size)


def test_added_tokens_are_read_and_written(base: PreTrainedTokenizerFast, folder: Path) -> None:
    language = read(base, folder)
    assert language.text.encode("5 <t161> 31 <t163>") == [5, 161, 31, 163]
    assert language.text.decode([163, 7]) == "<t163>7"
    detokenizer = language.text.detokenizer()
    assert [detokenizer.push(t) for t in (5, 161, 164, 3)] == ["5", "<t161>", "", "3"]
    assert language.warnings == ()


def test_its_end_of_text_ends_answers_as_the_base_s_does(
    base: PreTrainedTokenizerFast, folder: Path
) -> None:
    assert read(base, folder).eos_token_ids == {2, 164}


def test_without_a_template_chats_are_written_by_the_base_s(
    base: PreTrainedTokenizerFast, folder: Path
) -> None:
    messages = [{"role": "user", "content": "5 <t161>"}]
    assert read(base, folder).text.render_chat(messages) == [1, 5, 161, 2]


def test_its_own_template_comes_first(base: PreTrainedTokenizerFast, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("<t160> {{ messages[0].content }} <t162>")
    messages = [{"role": "user", "content": "5 <t161>"}]
    assert read(base, folder).text.render_chat(messages) == [160, 5, 161, 162]


def test_tokenizer_json_is_enough(base: PreTrainedTokenizerFast, folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    language = read(base, folder)
    assert language.text.encode("<t161>") == [161]
    assert language.eos_token_ids == {2}


def test_without_a_tokenizer_the_added_tokens_have_no_text(
    base: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    language = read(base, tmp_path)
    assert [w for w in language.warnings if "no tokenizer.json" in w]
    assert language.text.decode([5, 161, 6]) == "56"
    detokenizer = language.text.detokenizer()
    assert [*map(detokenizer.push, (161, 5, 161, 6)), detokenizer.finish()] == [
        "",
        "5",
        "",
        "6",
        "",
    ]
    assert (language.eos_token_ids, language.fingerprint) == ({2}, "")


def test_many_tokens_without_text_take_constant_work_each(
    base: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = read(base, tmp_path).text
    decode, lengths = text.decode, []

    def noted(ids: Sequence[int], **how: Any) -> str:
        lengths.append(len(ids))
        return decode(ids, **how)

    monkeypatch.setattr(text, "decode", noted)
    detokenizer = text.detokenizer()
    tokens = [7, *[161] * 1000, 8]
    assert "".join([*map(detokenizer.push, tokens), detokenizer.finish()]) == "78"
    assert max(lengths) < 100


def test_the_fingerprint_hangs_on_every_file(base: PreTrainedTokenizerFast, folder: Path) -> None:
    first = read(base, folder).fingerprint
    assert read(base, folder).fingerprint == first
    (folder / "README.md").write_text("not of the tokenizer")
    assert read(base, folder).fingerprint == first
    (folder / "chat_template.jinja").write_text("5")
    assert read(base, folder).fingerprint not in ("", first)


def edit(name: str, **change: Any) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    return run


def put(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def too_large(folder: Path) -> None:
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(adapter_text.MAX_TOKENIZER_BYTES + 1)


def as_pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def more_tokens(folder: Path) -> None:
    tokenizer = grown_tokenizer()
    tokenizer.add_tokens(["<t165>"])
    tokenizer.save_pretrained(folder)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "too large": (too_large, "too large"),
    "large template": (put("chat_template.jinja", b"5" * (4 * 2**20 + 1)), "too large"),
    "pipe": (as_pipe, "no regular file"),
    "no JSON": (put("tokenizer.json", b"{"), "cannot be used"),
    "empty": (put("tokenizer.json", b""), "cannot be used"),
    "another JSON": (put("tokenizer.json", b"[1, 2]"), "cannot be used"),
    "deep": (put("tokenizer.json", b"[" * 100_000), "cannot be used"),
    "deep settings": (put("tokenizer_config.json", b'{"a":' + b"[" * 100_000), "too deep|not JSON"),
    "many values": (
        put("tokenizer_config.json", b'{"a": [' + b"1," * 500_001 + b"1]}"),
        "too large",
    ),
    "settings that are a list": (put("tokenizer_config.json", b"[]"), "JSON object"),
    "tokens that are a list": (put("added_tokens.json", b"[]"), "JSON object"),
    "code": (
        edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        "auto_map",
    ),
    "strange settings": (edit("tokenizer_config.json", added_tokens_decoder=7), "cannot be used"),
    "more tokens than rows": (
        more_tokens,
        "has tokens up to 165, the adapter's vocabulary has 165",
    ),
    "strange model": (edit("tokenizer.json", model={"type": "Evil"}), "cannot be used"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_cannot_be_used_refuses_the_adapter(
    base: PreTrainedTokenizerFast, folder: Path, name: str
) -> None:
    spoil, words = HOSTILE[name]
    spoil(folder)
    began = time.monotonic()
    with pytest.raises(AdapterRefused, match=words):
        read(base, folder)
    assert time.monotonic() - began < 20


def test_an_unknown_class_is_the_plain_one(base: PreTrainedTokenizerFast, folder: Path) -> None:
    edit("tokenizer_config.json", tokenizer_class="Nothing")(folder)
    assert read(base, folder).text.encode("<t161>") == [161]


def test_code_beside_a_tokenizer_is_never_run(
    base: PreTrainedTokenizerFast, folder: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})(folder)
    with pytest.raises(AdapterRefused):
        read(base, folder)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_cannot_have_other_files_read(
    base: PreTrainedTokenizerFast, folder: Path, tmp_path: Path, file: str
) -> None:
    elsewhere = str(tmp_path / "elsewhere.json")
    word_tokenizer(9).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(elsewhere)
    places = {"tokenizer_file": elsewhere, "vocab_file": elsewhere, "vocab": elsewhere}
    if file == "special_tokens_map.json":
        (folder / file).write_text("{}")
        (folder / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
    edit(file, **places)(folder)
    assert read(base, folder).text.encode("<t161>") == [161]


def test_no_word_of_a_refusal_is_out_of_a_file(base: PreTrainedTokenizerFast, folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "secret-token"}')
    with pytest.raises(AdapterRefused) as refusal:
        read(base, folder)
    assert "secret" not in str(refusal.value)


class Panic(BaseException):
    """What a tokenizer's native code raises."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [ValueError("no"), Panic("index out of bounds")])
def test_what_a_tokenizer_fails_at_is_that_request_s_alone(
    base: PreTrainedTokenizerFast, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    kind = type(base)
    base.__class__ = type("Failing", (kind,), dict.fromkeys(("encode", "decode"), fail))
    base.apply_chat_template = fail
    text = AdapterText(base, GROWN)
    with pytest.raises(InvalidRequest, match="fails at this text"):
        text.encode("5")
    with pytest.raises(InvalidRequest):
        text.render_chat([{"role": "user", "content": "5"}])
    assert text.decode([5]) == ""
    detokenizer = text.detokenizer()
    assert "".join([*map(detokenizer.push, [5] * 200), detokenizer.finish()]) == ""
    assert caplog.text.count("whose text is lost") == 1


def test_an_interrupt_is_not_the_tokenizer_s(base: PreTrainedTokenizerFast) -> None:
    def interrupt(*args: object, **kwargs: object) -> Any:
        raise KeyboardInterrupt

    text = AdapterText(base, GROWN)
    base.encode = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        text.encode("5")
