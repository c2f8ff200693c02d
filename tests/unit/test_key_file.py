"""Keys as they are written down: what is read, and what is refused without a word of any key."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from loramux.errors import ConfigError
from loramux.server.key_file import FIELDS, read_keys
from loramux.server.keys import Key, Keyring
from loramux.server.limits import Limits

CHECKOUT = Path(__file__).parents[2]
SECRET = "sk-R7verysecretQ9"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
PLAIN = f'[[key]]\nname = "a"\nkey = "{SECRET}"\n'
HASHED = f'[[key]]\nname = "a"\nsha256 = "{DIGEST}"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    return path


def read(path: Path, text: str) -> Keyring:
    path.write_text(text, encoding="utf-8")
    return read_keys(str(path), {})


def name_of(keyring: Keyring, key: str) -> str | None:
    caller = keyring.find(key.encode())
    return None if caller is None or caller.key is None else caller.key.name


def test_without_any_key_everyone_may_ask() -> None:
    keyring = read_keys(None, {})
    assert keyring.keys == ()
    assert keyring.open_inference


def test_all_fields_are_read(path: Path) -> None:
    text = HASHED + (
        'adapters = ["tenant-a-*", "base"]\nmin_priority = -3\nrequests_per_second = 0.5\n'
        "tokens_per_minute = 60000\nmax_in_flight = 8\n"
    )
    [key] = read(path, text).keys
    assert key == Key(
        name="a",
        digest=bytes.fromhex(DIGEST),
        adapters=("tenant-a-*", "base"),
        min_priority=-3,
        limits=Limits(requests_per_second=0.5, tokens_per_minute=60000, max_in_flight=8),
    )


@pytest.mark.parametrize("text", [PLAIN, HASHED, HASHED.replace(DIGEST, DIGEST.upper())])
def test_a_key_is_found_by_itself_alone(path: Path, text: str) -> None:
    keyring = read(path, text + '[[key]]\nname = "b"\nkey = "other"\n')
    assert name_of(keyring, SECRET) == "a"
    assert name_of(keyring, "other") == "b"
    for wrong in ("", SECRET[:-1], SECRET + "x", SECRET.upper(), DIGEST, "a"):
        assert name_of(keyring, wrong) is None


@pytest.mark.parametrize(
    ("more", "admin", "infer"),
    [
        ("", False, True),
        ("infer = true", False, True),
        ("admin = true", True, False),
        ("admin = true\ninfer = true", True, True),
    ],
)
def test_an_admin_key_may_not_infer_unless_it_says_so(
    path: Path, more: str, admin: bool, infer: bool
) -> None:
    [key] = read(path, HASHED + more).keys
    assert (key.admin, key.infer, key.may_ask("base")) == (admin, infer, infer)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("tenant-a-*", ["tenant-a-", "tenant-a-x/y"], ["tenant-a", "tenant-b-x", "Tenant-a-x"]),
        ("one", ["one"], ["One", "one2", "zone", ""]),
        ("v?", ["v1"], ["v", "v12"]),
        ("[ab]", ["a", "b", "[ab]"], ["c"]),
    ],
)
def test_adapters_are_names_or_patterns(
    path: Path, pattern: str, fitting: list[str], others: list[str]
) -> None:
    [key] = read(path, HASHED + f'adapters = ["{pattern}"]').keys
    assert [name for name in fitting + others if key.may_ask(name)] == fitting


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no keys: write each one under [[key]]"),
        ("[key]\nname = 'a'", "[[key]]"),
        ("key = [1]", "[[key]]"),
        ("[[keys]]\nname = 'a'", "[[key]]"),
        (PLAIN + f'[others]\n"{SECRET}" = "b"', "[[key]]"),
        (f"[[key]]\nkey = {SECRET}", "no TOML (at line 2"),
        (f'[[key]]\n"{SECRET}" = 1\n"{SECRET}" = 2', "no TOML (at "),
        (f'[[key]]\nkey = "{SECRET}"', "key 1: name must be"),
        (PLAIN.replace('"a"', '"a b"'), "key 1: name must be"),
        (PLAIN.replace('"a"', '"-a"'), "key 1: name must be"),
        (PLAIN.replace('"a"', "5"), "key 1: name must be"),
        (PLAIN.replace('"a"', f'"{SECRET}"'), "key 1: the name is the key itself"),
        (HASHED.replace('"a"', f'"{SECRET}"'), "key 1: the name is the key itself"),
        (PLAIN + f'sha256 = "{DIGEST}"', "key 1: give either key, or sha256"),
        ('[[key]]\nname = "a"', "key 1: give either key, or sha256"),
        ('[[key]]\nname = "a"\nkey = ""', "key 1: key must be visible ASCII"),
        (PLAIN.replace(SECRET, SECRET + " "), "key 1: key must be visible ASCII"),
        (PLAIN.replace(SECRET, SECRET + "é"), "key 1: key must be visible ASCII"),
        (PLAIN.replace(f'"{SECRET}"', "7"), "key 1: key must be visible ASCII"),
        (HASHED.replace(DIGEST, SECRET), "key 1: sha256 must be 64 hexadecimal digits"),
        (PLAIN + "rate = 5", "key 1 (a) has an unknown field rate: use name, key,"),
        (PLAIN + f'"{SECRET}" = 5', "key 1 (a) has an unknown field: use name, key,"),
        (PLAIN + "admin = 1", "(a): admin must be true or false"),
        (PLAIN + 'infer = "yes"', "(a): infer must be true or false"),
        (PLAIN + "infer = false", "(a) may do nothing"),
        (PLAIN + 'admin = true\nadapters = ["x"]', "(a): adapters bounds requests to models"),
        (PLAIN + "admin = true\nmax_in_flight = 1", "(a): max_in_flight bounds requests"),
        (PLAIN + "admin = true\nmin_priority = 1", "(a): min_priority bounds requests"),
        (PLAIN + "min_priority = true", "(a): min_priority must be a whole number"),
        (PLAIN + "min_priority = 0.5", "(a): min_priority must be a whole number"),
        (PLAIN + "min_priority = -2147483649", "(a): min_priority must be a whole number"),
        (PLAIN + "min_priority = 2147483648", "(a): min_priority must be a whole number"),
        (PLAIN + 'adapters = "x"', "(a): adapters must be a list"),
        (PLAIN + "adapters = []", "(a): adapters must be a list"),
        (PLAIN + 'adapters = ["x", ""]', "(a): adapters must be a list"),
        (PLAIN + "adapters = [5]", "(a): adapters must be a list"),
        (PLAIN + "requests_per_second = 0", "(a): requests_per_second must be a number above 0"),
        (PLAIN + "requests_per_second = nan", "(a): requests_per_second must be a number"),
        (PLAIN + "requests_per_second = inf", "(a): requests_per_second must be a number"),
        (PLAIN + "requests_per_second = true", "(a): requests_per_second must be a number"),
        (PLAIN + 'requests_per_second = "5"', "(a): requests_per_second must be a number"),
        (PLAIN + "tokens_per_minute = 0", "(a): tokens_per_minute must be a whole number"),
        (PLAIN + "tokens_per_minute = 1.5", "(a): tokens_per_minute must be a whole number"),
        (PLAIN + "max_in_flight = -1", "(a): max_in_flight must be a whole number"),
        (PLAIN + "max_in_flight = true", "(a): max_in_flight must be a whole number"),
        (PLAIN + PLAIN.replace(SECRET, "b"), "two keys have the name 'a'"),
        (PLAIN + HASHED.replace('"a"', '"b"'), "the keys 'a' and 'b' are the same"),
    ],
)
def test_what_is_not_clear_is_refused_without_a_word_of_the_key(
    path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError) as refused:
        read(path, text)
    assert words in str(refused.value)
    assert SECRET not in str(refused.value) + caplog.text
    assert refused.value.__cause__ is None


def test_an_entry_is_named_by_its_file_and_number(path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"keys file '{path}', key 2: name must be"):
        read(path, PLAIN + "[[key]]\n")


@pytest.mark.parametrize("place", ["", "none.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, place: str) -> None:
    name = str(tmp_path / place) if place else ""
    with pytest.raises(ConfigError) as refused:
        read_keys(name, {})
    assert f"keys file {name!r} cannot be read" in str(refused.value)


def test_bytes_that_are_no_text_are_no_toml(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="no TOML"):
        read_keys(str(path), {})


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o444])
def test_plain_keys_that_everyone_may_read_are_refused(path: Path, mode: int) -> None:
    path.write_text(PLAIN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"'{path}' holds keys in plain text .* chmod 600"):
        read_keys(str(path), {})


@pytest.mark.parametrize("text", [PLAIN, HASHED])
@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_a_file_that_everyone_may_write_is_refused(path: Path, mode: int, text: str) -> None:
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"'{path}' can be written by everyone.*chmod o-w"):
        read_keys(str(path), {})


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (0o600, PLAIN),
        (0o440, PLAIN),  # a secret of Kubernetes with its group, a credential of systemd
        (0o400, PLAIN),
        (0o644, HASHED),
        (0o444, HASHED),
    ],
)
def test_what_a_group_may_read_or_holds_digests_is_fine(path: Path, mode: int, text: str) -> None:
    path.write_text(text)
    path.chmod(mode)
    assert [key.name for key in read_keys(str(path), {}).keys] == ["a"]


def test_the_log_has_names_and_no_keys(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loramux")
    read(path, PLAIN + '[[key]]\nname = "b"\nkey = "other-key"\nadmin = true\n')
    assert "keys: a, b (admin)" in caplog.text
    assert SECRET not in caplog.text
    assert "other-key" not in caplog.text


def test_a_key_does_not_show_its_digest(path: Path) -> None:
    [key] = read(path, PLAIN).keys
    assert "digest" not in repr(key)


@pytest.mark.parametrize(
    ("environ", "rights", "open_inference"),
    [
        ({"LORAMUX_API_KEY": "x"}, {"LORAMUX_API_KEY": (False, True)}, False),
        ({"LORAMUX_ADMIN_KEY": "x"}, {"LORAMUX_ADMIN_KEY": (True, False)}, True),
        (
            {"LORAMUX_API_KEY": "x", "LORAMUX_ADMIN_KEY": "y"},
            {"LORAMUX_API_KEY": (False, True), "LORAMUX_ADMIN_KEY": (True, False)},
            False,
        ),
    ],
)
def test_variables_hold_one_key_of_each_kind(
    environ: dict[str, str], rights: dict[str, tuple[bool, bool]], open_inference: bool
) -> None:
    keyring = read_keys(None, environ)
    assert {key.name: (key.admin, key.infer) for key in keyring.keys} == rights
    assert keyring.open_inference is open_inference
    assert {name_of(keyring, value) for value in environ.values()} == set(environ)


def test_a_file_guards_requests_even_when_no_key_in_it_may_send_any(path: Path) -> None:
    assert not read(path, HASHED + "admin = true").open_inference


def test_the_option_comes_before_the_variable(path: Path, tmp_path: Path) -> None:
    path.write_text(HASHED)
    other = tmp_path / "other.toml"
    other.write_text(HASHED.replace('"a"', '"b"'))
    environ = {"LORAMUX_KEYS": str(other)}
    assert [key.name for key in read_keys(str(path), environ).keys] == ["a"]
    assert [key.name for key in read_keys(None, environ).keys] == ["b"]


def test_keys_of_variables_come_beside_those_of_the_file(path: Path) -> None:
    path.write_text(HASHED)
    keyring = read_keys(str(path), {"LORAMUX_ADMIN_KEY": "x"})
    assert [key.name for key in keyring.keys] == ["a", "LORAMUX_ADMIN_KEY"]


def test_a_variable_may_not_repeat_a_key_of_the_file(path: Path) -> None:
    path.write_text(HASHED)
    with pytest.raises(ConfigError, match="'a' and 'LORAMUX_ADMIN_KEY' are the same"):
        read_keys(str(path), {"LORAMUX_ADMIN_KEY": SECRET})


@pytest.mark.parametrize("variable", ["LORAMUX_API_KEY", "LORAMUX_ADMIN_KEY", "LORAMUX_KEYS"])
def test_an_empty_variable_does_not_open_the_server(variable: str) -> None:
    with pytest.raises(ConfigError):
        read_keys(None, {variable: ""})


def test_the_example_file_is_read_and_stands_in_the_document() -> None:
    example = CHECKOUT / "examples" / "keys.toml"
    tenant, in_house, operator = read_keys(str(example), {}).keys
    assert [tenant.may_ask(name) for name in ("tenant-a-x", "base")] == [True, False]
    assert in_house.may_ask("base")
    assert (operator.admin, operator.infer) == (True, False)
    document = (CHECKOUT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert f"```toml\n{example.read_text(encoding='utf-8')}```\n" in document


def test_the_document_has_every_field() -> None:
    document = (CHECKOUT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [field for field in FIELDS if f"`{field}`" not in document] == []
