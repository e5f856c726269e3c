"""Stage 1: precedence, and one-line errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3_sglang.launch.settings import FILE_ONLY, LaunchSettings, SettingsError, parse, read_file, validate


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*arguments: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "port: 4000\nkv_tokens: 5000\n")
    settings = parse(["--config", file, "--kv-tokens", "6000"]).settings
    assert (settings.port, settings.kv_tokens, settings.host) == (4000, 6000, "127.0.0.1")


def test_without_arguments_the_tiny_model_is_served_on_loopback() -> None:
    request = parse([])
    assert not request.dry_run
    assert (request.settings.model, request.settings.host, request.settings.port) == ("tiny", "127.0.0.1", 30000)


def test_every_setting_of_one_value_has_a_flag_of_the_same_name() -> None:
    values = {"int": "3", "str": "text"}
    for name, field in LaunchSettings.model_fields.items():
        if name in FILE_ONLY:
            continue
        flag = f"--{name.replace('_', '-')}"
        if field.annotation is bool:
            assert (getattr(parse([flag]).settings, name), field.default) == (True, False)
            continue
        kind = "int" if "int" in str(field.annotation) else "str"
        value = values[kind] if "Literal" not in str(field.annotation) else str(field.default or "b300")
        parsed = getattr(parse([flag, value]).settings, name)
        assert str(parsed) == value


def test_settings_cannot_be_changed_later() -> None:
    settings = parse([]).settings
    with pytest.raises(Exception, match="frozen"):
        settings.port = 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv_token: 4", "unknown key 'kv_token'; did you mean kv_tokens?"),
        ("zzz: 4", "unknown key 'zzz'; allowed: allow_image_files, allow_image_hosts, allow_no_keys, api_keys_env"),
        ("kv_tokens: many", "kv_tokens is 'many'"),
        ("kv_tokens: 0", "kv_tokens is 0; input should be greater than or equal to 1"),
        ("page_size: true", "page_size is True"),
        ("port: 70000", "port is 70000; input should be less than or equal to 65535"),
        ("device: gpu", "device is 'gpu'; input should be 'auto', 'cpu' or 'cuda'"),
        ("engine: {ep-size: [1]}", "engine.ep-size is [1]; it must be true, a number or text"),
        ("port: 1\nport: 2", "key 'port' is given twice"),
        ("- port", "holds a list; it must be a mapping"),
        ("port: [", "is not valid YAML"),
        ("served_name: 2026-13-99", "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_the_remedy(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal("--config", write(tmp_path / "bad.yaml", text))
    assert expected in message
    assert "bad.yaml" in message


def test_a_mistake_in_the_file_is_not_hidden_by_a_flag(tmp_path: Path) -> None:
    file = write(tmp_path / "bad.yaml", "port: 70000")
    assert "bad.yaml" in refusal("--config", file, "--port", "4000")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml: No such file" in refusal("--config", str(tmp_path / "nowhere.yaml"))


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"model: \xff\xfe\n")
    assert "bad.yaml is not valid YAML: 'utf-8' codec" in refusal("--config", str(tmp_path / "bad.yaml"))


def test_a_misspelt_flag_is_refused_with_the_nearest_one() -> None:
    assert "unknown argument '--kv-token'; did you mean --kv-tokens" in refusal("--kv-token", "4")


def test_flags_are_not_abbreviated() -> None:
    assert "'--served'" in refusal("--served", "x")


def test_a_flag_with_the_wrong_type_is_one_line() -> None:
    assert "argument --port: invalid int value: 'x'" in refusal("--port", "x")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read_file(Path(write(tmp_path / "empty.yaml", ""))) == {}
    assert validate({}, source="x") == LaunchSettings()  # pyright: ignore[reportCallIssue]


def test_engine_values_keep_their_types() -> None:
    settings = validate({"engine": {"a": True, "b": 8, "c": 0.5, "d": "x"}}, source="x")
    assert settings.engine == {"a": True, "b": 8, "c": 0.5, "d": "x"}
    assert [type(value) for value in settings.engine.values()] == [bool, int, float, str]


def test_the_help_describes_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name, field in LaunchSettings.model_fields.items():
        assert field.description
        assert name in FILE_ONLY or f"--{name.replace('_', '-')}" in text
