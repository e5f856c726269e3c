"""`serve --upstream`: the command line becomes the gateway's settings."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_runtime.__main__ import parser
from agent_runtime.command.upstream import settings
from agent_runtime.gateway.__main__ import app_of
from agent_runtime.gateway.foreign import ForeignServer
from agent_runtime.gateway.settings import GatewaySettings


def test_the_command_line_makes_a_gateway_before_the_server_it_names(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret", "utf-8")
    line = ["serve", "--upstream", "https://example.invalid/v1", "--profile", "vllm", "--upstream-model", "K3"]
    options = parser().parse_args([*line, "--upstream-key-file", str(key), "--guard", "strict", "--port", "8123"])
    made = GatewaySettings.model_validate(settings(options))
    assert (made.upstream_profile, made.upstream_model, made.guard, made.port) == ("vllm", "K3", "strict", 8123)
    assert (made.model, made.context_len, made.upstream_key_file) == ("kimi-k3", 1_048_576, key)
    assert "secret" not in str(settings(options)), "the key is read by the gateway only"
    assert ForeignServer(made).profile.thinking_field == "reasoning"
    assert app_of(made).routes


def test_before_another_server_keys_are_asked_for_too() -> None:
    line = ["serve", "--upstream", "https://example.invalid/v1", "--host", "0.0.0.0"]
    made = GatewaySettings.model_validate(settings(parser().parse_args([*line, "--api-keys-env", "SOME_KEYS"])))
    assert (made.api_keys_env, made.allow_no_keys) == ("SOME_KEYS", False)
    with pytest.raises(ValidationError, match="there are no API keys"):
        GatewaySettings.model_validate(settings(parser().parse_args(line)))
    assert GatewaySettings.model_validate(settings(parser().parse_args([*line, "--allow-no-keys"]))).allow_no_keys
