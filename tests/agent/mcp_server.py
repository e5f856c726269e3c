"""An MCP server on standard streams, for the tests of the client."""

# The SDK is optional and may be missing where this is checked.
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import os

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("tests")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fails(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


@server.tool()
def variable(name: str) -> str:
    """One variable of the server's environment."""
    return os.environ.get(name, "(not set)")


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
