"""The registry executes calls and turns every failure into a value."""

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.registry import ToolDefinitionError, ToolError, ToolRegistry, tool
from agent_runtime.tools.result import Failure, ToolResult, cut_middle
from agent_runtime.tools.shell import shell_tool


def call(tool_name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(f"id-{tool_name}", tool_name, json.dumps(arguments))


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@tool
async def echo(text: str) -> str:
    """Give a text back.

    Args:
        text: The text.
    """
    return text


async def test_sync_and_async_tools_run() -> None:
    registry = ToolRegistry([add, echo])
    assert await registry.execute(call("add", a=1, b=2)) == ToolResult("3")
    assert await registry.execute(call("echo", text="hi")) == ToolResult("hi")


async def test_an_unknown_tool_is_answered_with_the_nearest_name() -> None:
    result = await ToolRegistry([add, echo]).execute(call("ecko"))
    assert result.failure is Failure.UNKNOWN_TOOL
    assert result.model == "There is no tool named 'ecko'. Did you mean 'echo'? Available tools: add, echo."


async def test_an_exception_in_a_tool_is_a_result_and_its_traceback_is_for_debugging_only() -> None:
    @tool
    def broken() -> str:
        """Fails."""
        raise KeyError("secret detail")

    @tool
    def leaves() -> str:
        """Ends the program."""
        sys.exit(3)

    registry = ToolRegistry([broken, leaves])
    result = await registry.execute(call("broken"))
    assert result.failure is Failure.CRASHED
    assert result.model == "broken failed with KeyError: 'secret detail'"
    assert "Traceback" in result.debug and "Traceback" not in result.model + result.user
    assert (await registry.execute(call("leaves"))).failure is Failure.CRASHED


async def test_a_tool_words_its_refusal_for_each_reader() -> None:
    @tool
    async def refuses() -> str:
        """Refuses."""
        raise ToolError("for the model", user="for the user", debug="for the log")

    result = await ToolRegistry([refuses]).execute(call("refuses"))
    assert result == ToolResult("for the model", "for the user", "for the log", Failure.REFUSED)


async def test_a_value_that_json_cannot_carry_is_a_failure() -> None:
    @tool
    def strange() -> object:
        """Returns something strange."""
        return object()

    result = await ToolRegistry([strange]).execute(call("strange"))
    assert result.failure is Failure.CRASHED and "cannot be written as JSON" in result.model


async def test_structured_values_are_returned_as_json() -> None:
    @tool
    def table() -> dict[str, list[int]]:
        """A table."""
        return {"rows": [1, 2]}

    assert (await ToolRegistry([table]).execute(call("table"))).model == '{"rows":[1,2]}'


async def test_a_hanging_async_tool_is_cancelled_at_its_timeout() -> None:
    cancelled = asyncio.Event()

    @tool(timeout_s=0.05)
    async def hangs() -> str:
        """Never returns."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    result = await ToolRegistry([hangs]).execute(call("hangs"))
    assert result.failure is Failure.TIMEOUT and "0.05 s" in result.model
    assert cancelled.is_set()


async def test_a_hanging_sync_tool_is_given_up_at_its_timeout() -> None:
    release = threading.Event()

    @tool(timeout_s=0.05)
    def hangs() -> str:
        """Never returns."""
        release.wait()
        return ""

    result = await ToolRegistry([hangs]).execute(call("hangs"))
    release.set()
    assert result.failure is Failure.TIMEOUT


async def test_a_timeout_raised_inside_a_tool_is_not_taken_for_the_tools_own() -> None:
    @tool
    async def upstream() -> str:
        """Fails with somebody else's timeout."""
        raise TimeoutError("database")

    result = await ToolRegistry([upstream]).execute(call("upstream"))
    assert result.failure is Failure.CRASHED and "database" in result.model


async def test_a_tool_that_cancels_itself_is_a_failure_and_its_neighbours_go_on() -> None:
    @tool
    async def gives_up() -> str:
        """Raise what a cancelled task of its own would raise."""
        raise asyncio.CancelledError

    registry = ToolRegistry([gives_up, add])
    failed, fine = await registry.execute_all([call("gives_up"), call("add", a=1, b=2)])
    assert failed.failure is Failure.CRASHED and "CancelledError" in failed.model
    assert fine.model == "3"


async def test_runaway_output_is_cut_in_the_middle_with_a_note() -> None:
    @tool
    def floods() -> str:
        """Returns too much."""
        return "a" * 500 + "ä" * 5000 + "z" * 500

    result = await ToolRegistry([floods], max_result_bytes=1000).execute(call("floods"))
    assert result.model == "a" * 500 + "\n[... 10000 bytes omitted ...]\n" + "z" * 500


def test_cutting_never_leaves_half_a_character() -> None:
    for limit in range(1, 40):
        cut_middle("äöü€😀" * 10, limit).encode("utf-8")
        assert "\ufffd" not in cut_middle("äöü€😀" * 10, limit)


async def test_text_that_utf8_cannot_carry_is_made_safe() -> None:
    @tool
    def surrogates() -> str:
        """Returns a broken file name."""
        return b"bad-\xff".decode("utf-8", "surrogateescape")

    result = await ToolRegistry([surrogates]).execute(call("surrogates"))
    assert result.model == "bad-?"


async def test_parallel_calls_run_together_up_to_the_limit_and_keep_their_order() -> None:
    running, most = 0, 0
    both = asyncio.Event()

    @tool
    async def meet(name: str) -> str:
        """Waits for a second caller.

        Args:
            name: Who.
        """
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            both.set()
        await both.wait()
        running -= 1
        return name

    registry = ToolRegistry([meet], max_parallel=2)
    ended: list[int] = []
    results = await registry.execute_all([call("meet", name=n) for n in "abcd"], on_result=lambda i, _: ended.append(i))
    assert [result.model for result in results] == ["a", "b", "c", "d"]
    assert most == 2 and sorted(ended) == [0, 1, 2, 3]


async def test_calls_that_change_things_run_alone_and_in_order() -> None:
    log: list[str] = []

    @tool
    async def look(name: str) -> str:
        """Looks.

        Args:
            name: Who.
        """
        log.append(f"+{name}")
        await asyncio.sleep(0)
        log.append(f"-{name}")
        return name

    change = tool(name="change", parallel=False)(look.function)
    registry = ToolRegistry([look, change])
    wanted = [("look", "a"), ("look", "b"), ("change", "c"), ("change", "d"), ("look", "e")]
    await registry.execute_all([call(kind, name=name) for kind, name in wanted])
    assert log == ["+a", "+b", "-a", "-b", "+c", "-c", "+d", "-d", "+e", "-e"]


async def test_cancelling_a_batch_cancels_its_running_calls_and_keeps_what_was_finished() -> None:
    started = asyncio.Event()
    cancelled: list[str] = []

    @tool
    async def hangs(name: str) -> str:
        """Never returns.

        Args:
            name: Who.
        """
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)
        return ""

    finished: dict[int, ToolResult] = {}
    registry = ToolRegistry([hangs, add])
    batch = [call("add", a=1, b=1), call("hangs", name="x"), call("hangs", name="y")]
    task = asyncio.create_task(registry.execute_all(batch, on_result=finished.__setitem__))
    await started.wait()
    while 0 not in finished:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == ["x", "y"] and finished == {0: ToolResult("2")}


def test_the_order_of_registration_does_not_move_the_schemas() -> None:
    assert ToolRegistry([add, echo]).schemas() == ToolRegistry([echo, add]).schemas()


def test_registering_by_name_and_description_works_as_a_decorator() -> None:
    registry = ToolRegistry()

    @registry.register("twice", "Doubles a number.")
    def double(x: int) -> int:
        """Args:
        x: The number.
        """
        return 2 * x

    assert registry.names == ("twice",) and double(4) == 8
    assert registry.schemas()[0]["function"]["description"] == "Doubles a number."
    with pytest.raises(ToolDefinitionError, match="'twice' is already registered"):
        registry.add(double)


def test_the_builtin_tools_declare_exactly_the_recorded_schemas(tmp_path: Path) -> None:
    """These bytes open every prompt of the coding agent: a change here empties its cached prefix, so it is explicit.

    To accept a change, write the left side of the comparison into tool_schemas.json.
    """
    registry = ToolRegistry([*file_tools(tmp_path), shell_tool(tmp_path)])
    recorded = Path(__file__).with_name("tool_schemas.json").read_text("utf-8")
    assert json.dumps(registry.schemas(), indent=1, ensure_ascii=False) + "\n" == recorded
