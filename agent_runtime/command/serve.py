"""`serve`: an agent with file and shell tools behind HTTP, or the gateway before another K3 server."""

from __future__ import annotations

import argparse
import asyncio

from agent_runtime.command import agents, upstream
from agent_runtime.engine.openai_chat import ChatClient
from agent_runtime.limits import Limits
from agent_runtime.tools.server import AgentServer, ServerOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    agents.add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s); an agent has no authentication")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    upstream.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted. Raises ChatError when the endpoint cannot be asked for its window."""
    if options.upstream is not None:
        return upstream.run(options)
    registry = agents.registry(options, None, None)
    window = options.window or asyncio.run(_window(options))
    chosen = ServerOptions(
        system=agents.SYSTEM,
        limits=Limits(max_steps=options.max_steps),
        agent=agents.agent_options(options, window, None),
        chat=agents.chat_settings(options),
        api_key=options.api_key,
        meter=agents.meters(options),
    )
    server = AgentServer(options.base_url, registry, chosen)

    def listening(port: int) -> None:
        print(f"agent on http://{options.host}:{port}, tools: {', '.join(registry.names)}", flush=True)

    server.start(options.port, host=options.host, on_listening=listening)
    return 0


async def _window(options: argparse.Namespace) -> int | None:
    async with ChatClient(options.base_url, api_key=options.api_key, settings=agents.chat_settings(options)) as client:
        return await client.window()
