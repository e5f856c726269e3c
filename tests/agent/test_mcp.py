"""Tools of an MCP server through the official SDK, against a real server process."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools import mcp
from agent_runtime.tools.mcp import McpProcess, McpUnavailable, mcp_tools
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.result import Failure

needs_sdk = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the MCP SDK is not installed")
SERVER = McpProcess(sys.executable, [str(Path(__file__).parent / "mcp_server.py")])


async def test_without_the_sdk_there_is_one_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(McpUnavailable, match="pip install 'mcp"):
        async with mcp_tools(SERVER):
            raise AssertionError
    assert mcp.__name__ == "agent_runtime.tools.mcp"


@needs_sdk
async def test_tools_of_a_server_are_checked_called_and_their_failures_are_values() -> None:
    async with mcp_tools(SERVER, prefix="t_") as tools:
        registry = ToolRegistry(tools)
        assert registry.names == ("t_add", "t_dies", "t_fails", "t_variable")
        add, fails = registry.get("t_add"), registry.get("t_fails")
        assert add is not None and fails is not None and (add.parallel, fails.parallel) == (True, False)
        assert add.schema["function"]["description"] == "Adds two numbers."
        good = await registry.execute(ToolCall("c", "t_add", '{"a": 1, "b": 2}'))
        wrong = await registry.execute(ToolCall("c", "t_add", '{"a": "1", "b": 2}'))
        failed = await registry.execute(ToolCall("c", "t_fails", '{"reason": "because"}'))
    assert good.ok and good.model == "3"
    assert wrong.failure is Failure.INVALID_ARGUMENTS
    assert failed.failure is Failure.REFUSED and "because" in failed.model


@needs_sdk
async def test_the_server_gets_its_own_variables_and_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "A_SECRET_OF_OURS", "x")
    server = McpProcess(SERVER.command, SERVER.arguments, {"GIVEN": "yes"})
    async with mcp_tools(server) as tools:
        registry = ToolRegistry(tools)
        given = await registry.execute(ToolCall("c", "variable", '{"name": "GIVEN"}'))
        secret = await registry.execute(ToolCall("c", "variable", '{"name": "A_SECRET_OF_OURS"}'))
    assert (given.model, secret.model) == ("yes", "(not set)")


@needs_sdk
async def test_a_server_that_dies_is_a_failure_of_the_call() -> None:
    async with mcp_tools(SERVER, timeout_s=5.0) as tools:
        result = await ToolRegistry(tools).execute(ToolCall("c", "dies", "{}"))
    assert result.failure in (Failure.CRASHED, Failure.TIMEOUT, Failure.REFUSED)
