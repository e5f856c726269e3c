"""Tools of an MCP server, through the official SDK (`pip install 'mcp>=2.3,<3'`; not needed for anything else)."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from agent_runtime.errors import AgentRuntimeError
from agent_runtime.tools.registry import DEFAULT_TIMEOUT_S, Tool
from agent_runtime.tools.result import Failure, ToolResult
from agent_runtime.tools.schema_signature import SchemaSignature

_MAX_PAGES: Final = 100


class McpUnavailable(AgentRuntimeError):
    """The SDK is not installed."""


@dataclass(frozen=True, slots=True)
class McpProcess:
    """A server that is started as a child process and spoken to over its standard streams."""

    command: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to the few variables the SDK passes on; nothing else of ours reaches the server."""
    directory: str | None = None


McpServer: TypeAlias = McpProcess | str
"""A process to start, or the URL of a running server."""


@asynccontextmanager
async def mcp_tools(
    server: McpServer, *, prefix: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
) -> AsyncGenerator[list[Tool]]:
    """Connect to a server and yield its tools; the connection lasts as long as the block.

    A tool that its server calls read-only may run beside others; any other runs alone. The list is read once: it goes
    into the prompt, which must not change under a session.

    Args:
        prefix: put before every name, for servers whose names collide.
        timeout_s: limit of one call.

    Raises:
        McpUnavailable: the SDK is missing.
        ToolDefinitionError: a tool has a name or a schema no endpoint takes.
    """
    sdk = _sdk()
    target: Any = server
    if isinstance(server, McpProcess):
        target = sdk.StdioServerParameters(
            command=server.command,
            args=list(server.arguments),
            env=dict(server.environment) or None,
            cwd=server.directory,
        )
    async with sdk.Client(target) as client:
        yield [_tool(client, described, prefix, timeout_s) for described in await _all_tools(client)]


def _sdk() -> Any:
    """The SDK without its types: it may be missing where this is checked."""
    try:
        return importlib.import_module("mcp")
    except ImportError as error:
        raise McpUnavailable("the MCP SDK is not installed; run: pip install 'mcp>=2.3,<3'") from error


async def _all_tools(client: Any) -> list[Any]:
    found: list[Any] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise AgentRuntimeError(f"the MCP server lists more than {_MAX_PAGES} pages of tools")


def _tool(client: Any, described: Any, prefix: str, timeout_s: float) -> Tool:
    name = str(described.name)

    async def call(**arguments: Any) -> ToolResult:
        return _result(await client.call_tool(name, arguments))

    signature = SchemaSignature(
        f"{prefix}{name}",
        str(described.description or described.title or name),
        {"properties": {}, **cast("dict[str, Any]", described.input_schema)},
    )
    hints = described.annotations
    return Tool(call, signature, timeout_s, parallel=hints is not None and hints.read_only_hint is True)


def _result(result: Any) -> ToolResult:
    parts = [block.text if block.type == "text" else f"[{block.type}, not shown]" for block in result.content]
    text = "\n".join(parts)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return ToolResult(text or "(no content)", failure=Failure.REFUSED if result.is_error else None)
