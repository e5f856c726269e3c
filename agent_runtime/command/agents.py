"""What `chat` and `serve` have in common: the endpoint, the tools, the limits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from agent_runtime.compression.count import ContextMeter, EncoderMeter, UsageMeter
from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.engine.openai_chat import ChatSettings
from agent_runtime.limits import Limits
from agent_runtime.loop import AgentOptions
from agent_runtime.subagents import delegate_tool
from agent_runtime.tools.approval import Approve
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.plan import Plan
from agent_runtime.tools.recovery import recovery_tools
from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.sandbox import Bubblewrap
from agent_runtime.tools.shell import ShellSettings, shell_tool
from k3_sglang.chat.tokenizer import K3Tokenizer

DEFAULT_BASE_URL = "http://127.0.0.1:30000/v1"
SYSTEM = "You are a careful assistant. Use the tools to look at things before you change them or speak about them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of an agent."""
    parser.add_argument("--base-url", default=os.environ.get("K3_BASE_URL", DEFAULT_BASE_URL), help="(%(default)s)")
    parser.add_argument("--model", help="served model; default: the first the endpoint lists")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--workdir", type=Path, help="directory for file and shell tools; default: no such tools")
    parser.add_argument("--sandbox", action="store_true", help="run commands in bubblewrap")
    parser.add_argument("--max-steps", type=int, default=Limits().max_steps, help="per task (%(default)s)")
    parser.add_argument("--max-output-tokens", type=int, help="per answer; default: the endpoint's")
    parser.add_argument("--compress-at", type=int, help="tokens at which the history is compressed")
    parser.add_argument("--window", type=int, help="context length; default: what the endpoint says")
    parser.add_argument("--tokenizer", type=Path, help="folder with K3's tokenizer: exact counts before each call")


def chat_settings(options: argparse.Namespace) -> ChatSettings:
    """What every request carries."""
    return ChatSettings(model=options.model, max_output_tokens=options.max_output_tokens)


def registry(options: argparse.Namespace, plan: Plan | None, approve: Approve | None) -> ToolRegistry:
    """The tools. Raises NotADirectoryError or SandboxUnavailable when they cannot be made."""
    tools = [*recovery_tools(), delegate_tool(Limits(max_steps=options.max_steps))]
    if plan is not None:
        tools.append(plan.tool())
    if options.workdir is not None:
        shell = ShellSettings(sandbox=Bubblewrap() if options.sandbox else None)
        tools += [*file_tools(options.workdir), shell_tool(options.workdir, shell)]
    return ToolRegistry(tools, approve=approve)


def agent_options(options: argparse.Namespace, window: int | None, plan: Plan | None) -> AgentOptions:
    """When to compress, with the window the endpoint told. Raises ValueError when the sizes do not go together."""
    settings = CompressionSettings(options.compress_at, options.window or window)
    return AgentOptions(settings) if plan is None else AgentOptions(settings, plan.attachments)


def meters(options: argparse.Namespace) -> Callable[[], ContextMeter]:
    """What makes the count of a session. Raises what reading the tokenizer raises."""
    if options.tokenizer is None:
        return UsageMeter
    tokenizer = K3Tokenizer.from_dir(options.tokenizer)
    return lambda: EncoderMeter(tokenizer)
