"""The clients of the matrix: what is installed for each, the protocol it speaks, the driver that works it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clients.environments import NODE, OPENHANDS, PYTHON, Environment

Protocol = Literal["chat", "responses", "messages"]


@dataclass(frozen=True)
class Client:
    """One row."""

    name: str
    package: str
    """Its name in the registry; the environment tells the version."""
    protocol: Protocol
    environment: Environment
    driver: str
    """File of ``drivers/``. A Python driver of a Node client runs in the Python of the harness."""
    arguments: tuple[str, ...] = ()
    streams: bool = True
    """Whether the driver's way to use it streams."""
    timeout_s: int = 300
    note: str = ""
    """What a cell cannot say, in one line."""


CLIENTS = (
    Client("openai", "openai", "chat", PYTHON, "openai_chat.py", streams=False),
    Client("openai, stream", "openai", "chat", PYTHON, "openai_chat.py", ("stream",)),
    Client("openai, responses", "openai", "responses", PYTHON, "openai_responses.py"),
    Client("anthropic", "anthropic", "messages", PYTHON, "anthropic_messages.py"),
    Client(
        "openai-agents, chat",
        "openai-agents",
        "chat",
        PYTHON,
        "openai_agents.py",
        ("chat",),
        note="it drops all thinking of models that are not called deepseek",
    ),
    Client("openai-agents, responses", "openai-agents", "responses", PYTHON, "openai_agents.py", ("responses",)),
    Client("pydantic-ai", "pydantic-ai-slim", "chat", PYTHON, "pydantic_ai_agent.py", streams=False),
    Client(
        "langgraph, langchain-openai",
        "langchain-openai",
        "chat",
        PYTHON,
        "langgraph_agent.py",
        note="ChatOpenAI drops all thinking, in both directions",
    ),
    Client("litellm", "litellm", "chat", PYTHON, "litellm_completion.py"),
    Client(
        "mini-swe-agent",
        "mini-swe-agent",
        "chat",
        PYTHON,
        "mini_swe_agent.py",
        streams=False,
        note="it leaves a turn without a call out of its history; the gateway puts it back when the session has a name",
    ),
    Client("OpenHands SDK", "openhands-sdk", "chat", OPENHANDS, "openhands_agent.py", streams=False),
    Client("Vercel AI SDK", "ai", "chat", NODE, "ai_sdk.mjs"),
    Client("Claude Code", "@anthropic-ai/claude-code", "messages", NODE, "claude_code.py"),
    Client("Kimi Code, kimi", "@moonshot-ai/kimi-code", "chat", NODE, "kimi_code.py", ("kimi",)),
    Client("Kimi Code, openai", "@moonshot-ai/kimi-code", "chat", NODE, "kimi_code.py", ("openai",)),
    Client("Kimi Code, anthropic", "@moonshot-ai/kimi-code", "messages", NODE, "kimi_code.py", ("anthropic",)),
    Client("opencode", "opencode-ai", "chat", NODE, "opencode.py"),
    Client("Codex", "@openai/codex", "responses", NODE, "codex.py"),
)


def chosen(names: list[str]) -> list[Client]:
    """The clients with one of these names, all without names.

    Raises:
        ValueError: a name is not in the catalog.
    """
    known = {client.name: client for client in CLIENTS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no client is called {unknown[0]!r}; there are: {'; '.join(known)}")
    return [client for client in CLIENTS if not names or client.name in names]
