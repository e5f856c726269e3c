"""Keys from a file or a variable: what is one, whose it is, and that no message repeats it."""

import stat
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.keys import ApiKeys, read_keys, readable_by_others
from agent_runtime.gateway.settings import GatewaySettings

FIRST, SECOND, THIRD = "first-key-000000", "second-key-00000=", "sk-third.key_000~+/"


def settings(tmp_path: Path, **fields: Any) -> GatewaySettings:
    """Settings that differ in what is given."""
    return GatewaySettings(model="m", tokenizer_dir=tmp_path, context_len=1, **fields)


def read(tmp_path: Path, text: str) -> ApiKeys:
    """The keys of a file with this text."""
    path = tmp_path / "keys"
    path.write_text(text)
    keys = read_keys(settings(tmp_path, api_keys_file=path))
    assert keys is not None
    return keys


def test_a_file_names_owners_and_may_have_comments(tmp_path: Path) -> None:
    keys = read(tmp_path, f"# all\n\nann:{FIRST}  # until May\n  ann : {SECOND}\n{THIRD}\n")
    assert (keys.owner(FIRST), keys.owner(SECOND)) == ("ann", "ann")
    nameless = keys.owner(THIRD)
    assert nameless is not None and nameless.startswith("key-") and THIRD not in nameless
    assert keys.owners == {"ann", nameless}
    for wrong in ("", FIRST[:-1], FIRST + "0", FIRST.upper(), "ann", f"ann:{FIRST}", "\udcff" * 16):
        assert keys.owner(wrong) is None


def test_the_owner_of_a_key_without_a_name_is_the_same_after_a_restart(tmp_path: Path) -> None:
    assert read(tmp_path, THIRD).owner(THIRD) == read(tmp_path, f"{FIRST}\n{THIRD}").owner(THIRD)


def test_a_variable_takes_commas_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", f"ann:{FIRST}, bob:{SECOND}\n{THIRD}")
    keys = read_keys(settings(tmp_path, api_keys_env="SOME_KEYS"))
    assert keys is not None
    assert (keys.owner(FIRST), keys.owner(SECOND)) == ("ann", "bob")


def test_without_either_there_are_no_keys(tmp_path: Path) -> None:
    assert read_keys(settings(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ann:short", "line 1: the key has 5 characters; a key is 16 to 512"),
        (f"# x\nann:{FIRST} {SECOND}", "line 2: the key has 34 characters"),
        (f"{'k' * 513}", "line 1: the key has 513 characters"),
        (f"ann:{FIRST}ä", "line 1: the key has 17 characters"),
        (f"an n:{FIRST}", "line 1: the name before the colon has 4 characters"),
        (f":{FIRST}", "line 1: the name before the colon has 0 characters"),
        (f"{'n' * 65}:{FIRST}", "line 1: the name before the colon has 65 characters"),
        (f"ann:{FIRST}\nbob:{FIRST}", "line 2: this key was there before"),
        ("# nothing\n", "has no key; write one a line"),
    ],
)
def test_a_malformed_file_is_refused_by_its_line_and_never_quoted(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError, match="api_keys_file") as raised:
        read(tmp_path, text)
    assert words in str(raised.value)
    assert FIRST not in str(raised.value) and "short" not in str(raised.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read api_keys_file .*: No such file"):
        read_keys(settings(tmp_path, api_keys_file=tmp_path / "none"))
    (tmp_path / "binary").write_bytes(FIRST.encode() + b"\xff")
    with pytest.raises(SettingsError, match="is not text") as raised:
        read_keys(settings(tmp_path, api_keys_file=tmp_path / "binary"))
    assert FIRST not in str(raised.value)


def test_a_variable_that_is_not_set_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEYS", raising=False)
    with pytest.raises(SettingsError, match="SOME_KEYS, which is not set"):
        read_keys(settings(tmp_path, api_keys_env="SOME_KEYS"))


def test_a_key_in_the_place_of_its_variables_name_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(f'{{"model": "m", "tokenizer_dir": "/", "context_len": 1, "api_keys_env": "{THIRD}"}}')
    with pytest.raises(SettingsError, match="api_keys_env=text that is no variable's name") as raised:
        GatewaySettings.from_file(file)
    assert THIRD not in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "some.host", ""])
def test_listening_where_others_reach_it_needs_keys_or_a_word(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValidationError, match="there are no API keys; set api_keys_file or api_keys_env"):
        settings(tmp_path, host=host)
    assert settings(tmp_path, host=host, allow_no_keys=True).host == host
    assert settings(tmp_path, host=host, api_keys_env="SOME_KEYS").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(tmp_path: Path, host: str) -> None:
    assert settings(tmp_path, host=host).host == host


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="both set; keep one"):
        settings(tmp_path, api_keys_env="A", api_keys_file=tmp_path / "keys")
    with pytest.raises(ValidationError, match="allow_no_keys is true and there are API keys"):
        settings(tmp_path, api_keys_env="A", allow_no_keys=True)


def test_a_file_that_everybody_can_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(FIRST)
    path.chmod(stat.S_IRUSR)
    assert not readable_by_others(path)
    path.chmod(0o644)
    assert readable_by_others(path)
