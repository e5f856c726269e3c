"""Approval fails closed: whatever is not a clear yes keeps the call from running."""

import asyncio
import threading
from typing import Any

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.approval import ApprovalRequest, Approve, Denied, approve_only
from agent_runtime.tools.registry import ToolDefinitionError, ToolRegistry, tool
from agent_runtime.tools.result import Failure, ToolResult

RAN: list[int] = []


@tool(parallel=False)
async def pay(amount: int) -> str:
    """Pays.

    Args:
        amount: How much.
    """
    RAN.append(amount)
    return "paid"


async def asked(approve: Approve, arguments: str = '{"amount": 3}', timeout_s: float = 5.0) -> ToolResult:
    RAN.clear()
    registry = ToolRegistry([pay], approve=approve, approval_timeout_s=timeout_s)
    return await registry.execute(ToolCall("c", "pay", arguments))


async def test_a_clear_yes_runs_the_call_with_the_arguments_that_were_shown() -> None:
    seen: list[ApprovalRequest] = []

    async def yes(request: ApprovalRequest) -> bool:
        seen.append(request)
        return True

    assert (await asked(yes)).model == "paid" and RAN == [3]
    assert seen == [ApprovalRequest("pay", {"amount": 3})]


async def _crashes(_: ApprovalRequest) -> bool:
    raise RuntimeError("hook is broken")


async def _exits(_: ApprovalRequest) -> bool:
    raise TimeoutError


async def _hangs(_: ApprovalRequest) -> bool:
    await asyncio.Event().wait()
    return True


def _truthy(_: ApprovalRequest) -> Any:
    return "yes"


@pytest.mark.parametrize(
    ("approve", "words", "debug"),
    [
        pytest.param(lambda _: False, "it was not approved", "", id="no"),
        pytest.param(lambda _: Denied("too much"), "too much", "", id="reason"),
        pytest.param(lambda _: None, "it was not approved", "returned None", id="nothing"),
        pytest.param(_truthy, "it was not approved", "returned 'yes'", id="truthy"),
        pytest.param(lambda: True, "the check that must approve it failed", "TypeError", id="wrong-signature"),
        pytest.param(_crashes, "the check that must approve it failed", "hook is broken", id="crash"),
        pytest.param(_exits, "nobody approved it within", "", id="own-timeout"),
        pytest.param(_hangs, "nobody approved it within 0.05 s", "", id="hang"),
    ],
)
async def test_anything_but_a_yes_is_a_no_that_the_model_reads(approve: Any, words: str, debug: str) -> None:
    result = await asked(approve, timeout_s=0.05 if approve is _hangs else 30.0)
    assert RAN == [] and result.failure is Failure.DENIED
    assert f"pay was not run: {words}" in result.model and debug in result.debug
    assert "broken" not in result.model, "a traceback is not for the model"


async def test_calls_that_cannot_run_anyway_are_not_asked_about() -> None:
    def never(_: ApprovalRequest) -> bool:
        raise AssertionError("asked")

    assert (await asked(never, '{"amount": "3"}')).failure is Failure.INVALID_ARGUMENTS
    assert (await ToolRegistry(approve=never).execute(ToolCall("c", "nope", "{}"))).failure is Failure.UNKNOWN_TOOL


async def test_a_hook_without_a_loop_waits_on_a_thread_of_its_own() -> None:
    threads: list[str] = []

    def slow(_: ApprovalRequest) -> bool:
        threads.append(threading.current_thread().name)
        return True

    assert (await asked(slow)).ok and threads != [threading.main_thread().name]


async def test_only_named_tools_can_be_let_through() -> None:
    assert (await asked(approve_only({"pay"}))).ok
    denied = await asked(approve_only({"look"}))
    assert "pay is not among the approved tools" in denied.model


async def test_a_tool_has_its_own_limit_of_calls_at_a_time_over_all_agents() -> None:
    running, most = 0, 0

    @tool(max_parallel=2)
    async def busy(n: int) -> int:
        """Is busy.

        Args:
            n: Which.
        """
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return n

    registry = ToolRegistry([busy])
    calls = [ToolCall(f"c{n}", "busy", f'{{"n": {n}}}') for n in range(6)]
    both = await asyncio.gather(registry.execute_all(calls), registry.execute_all(calls))
    assert most == 2 and [[r.model for r in results] for results in both] == [[str(n) for n in range(6)]] * 2
    with pytest.raises(ToolDefinitionError, match="max_parallel=0"):
        tool(max_parallel=0)(busy.function)
