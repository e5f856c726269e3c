"""Sub-agents: a tool that gives a part of the work to a fork of the session, which shares its cached prefix."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agent_runtime.limits import Limits
from agent_runtime.tools.registry import Tool, tool
from agent_runtime.tools.result import Failure, ToolError, ToolResult

if TYPE_CHECKING:
    from agent_runtime.loop import Agent

running_agent: ContextVar[Agent | None] = ContextVar("running_agent", default=None)
"""The agent whose run called the current tool."""
_depth: ContextVar[int] = ContextVar("depth", default=0)


def delegate_tool(limits: Limits | None = None, *, timeout_s: float = 3600.0, max_parallel: int = 4) -> Tool:
    """The tool `delegate`. Several calls of one turn run beside each other; a sub-agent cannot delegate further.

    Every sub-agent has the declarations, system text and history of its parent up to the last complete step, so its
    prompt begins with tokens that are in the cache. Only its final text comes back.
    """

    async def delegate(
        task: Annotated[str, Field(description="Complete task, with everything the assistant must find out.")],
    ) -> ToolResult:
        """Give a self-contained part of the work to an assistant who knows this conversation so far.

        It uses the same tools and answers with a final text. Use it for work whose details you do not need.
        """
        parent = running_agent.get()
        if parent is None:
            raise ToolError("There is no session to fork; delegate works inside an agent's run only.")
        if _depth.get():
            raise ToolError("A delegated task cannot be delegated further; do it yourself.")
        token = _depth.set(1)
        try:
            result = await parent.fork(limits=limits).run(task)
        finally:
            _depth.reset(token)
        parent.add_usage(result.usage)
        if result.completed:
            return ToolResult(result.text, f"done in {len(result.steps)} steps")
        return ToolResult(
            f"The delegated task ended without an answer ({result.status}). Last text: {result.text or '(none)'}",
            failure=Failure.REFUSED,
        )

    return tool(timeout_s=timeout_s, max_parallel=max_parallel)(delegate)
