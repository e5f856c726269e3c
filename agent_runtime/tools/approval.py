"""Asking before a call runs: whatever is not a clear yes is a no."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from agent_runtime.tools.result import Failure, ToolResult
from agent_runtime.tools.threads import call_function

DEFAULT_APPROVAL_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A call that is ready to run: its arguments have been checked and are those the function will get."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Denied:
    """A no, with the reason the model reads."""

    reason: str = ""


Approve: TypeAlias = Callable[[ApprovalRequest], "bool | Denied | Awaitable[bool | Denied]"]
"""Sync (run on a thread of its own) or async. Only True runs the call."""


async def ask(approve: Approve, request: ApprovalRequest, timeout_s: float) -> ToolResult | None:
    """None when the call may run. An exception, no answer in time, and any value but True are a no."""
    try:
        async with asyncio.timeout(timeout_s):
            answer: object = await call_function(approve, {"request": request}, positional=True)
    except TimeoutError:
        return _denied(request, f"nobody approved it within {timeout_s:g} s", "")
    except Exception as error:
        return _denied(request, "the check that must approve it failed", "".join(traceback.format_exception(error)))
    if answer is True:
        return None
    if isinstance(answer, Denied):
        return _denied(request, answer.reason or "it was not approved", "")
    return _denied(request, "it was not approved", f"the approval hook returned {answer!r}; only True approves")


def approve_only(names: Collection[str]) -> Approve:
    """A hook that lets the named tools run and refuses all others."""
    allowed = frozenset(names)

    def approve(request: ApprovalRequest) -> bool | Denied:
        return True if request.tool in allowed else Denied(f"{request.tool} is not among the approved tools")

    return approve


def _denied(request: ApprovalRequest, reason: str, debug: str) -> ToolResult:
    return ToolResult(
        model=f"{request.tool} was not run: {reason}. Do not try to reach the same by other means; "
        "go on without it, or ask the user.",
        user=f"{request.tool}: {reason}",
        debug=debug,
        failure=Failure.DENIED,
    )
