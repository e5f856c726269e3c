"""The exact words the model reads for what can go wrong with a call: malformed, unknown, stopped, refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.calls import cancelled, cut_off, over_budget
from agent_runtime.conversation import ToolCall
from agent_runtime.tools.approval import ApprovalRequest
from agent_runtime.tools.files import file_tools
from agent_runtime.tools.registry import ToolRegistry, tool
from agent_runtime.tools.result import Failure, ToolError
from agent_runtime.tools.shell import ShellSettings, shell_tool

CUT = "0000000000\n[... 30 bytes omitted ...]\n0000000007\n[exit code 0]"
EXPECTED = " Expected: {city: string; days: integer, optional}."


@tool
async def weather(city: str, days: int = 1) -> str:
    """Forecast.

    Args:
        city: Where.
        days: How many.
    """
    return f"{city} {days}"


@tool(timeout_s=0.05)
async def hangs() -> str:
    """Hangs."""
    await asyncio.Event().wait()
    return ""


@tool
async def breaks() -> str:
    """Breaks."""
    raise KeyError("secret path")


@tool
async def refuses() -> str:
    """Refuses."""
    raise ToolError("The city is unknown; try a larger one nearby.", user="no such city", debug="row 7")


@tool
async def odd() -> Any:
    """Returns what is no JSON."""
    return object()


async def seen(registry: ToolRegistry, name: str, arguments: str) -> tuple[str, Failure | None]:
    result = await registry.execute(ToolCall("c", name, arguments))
    return result.model, result.failure


def not_json(reason: str, received: str) -> str:
    return f"weather was not run: its arguments are not a valid JSON object ({reason}). Received: {received}.{EXPECTED}"


def wrong(*lines: str) -> str:
    return (
        "weather was not run: wrong arguments.\n" + "\n".join(f"- {line}" for line in lines) + "\n" + EXPECTED.strip()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", not_json("Expecting value: line 1 column 1 (char 0)", "''")),
        ('{"city": "Ro', not_json("Unterminated string starting at: line 1 column 10 (char 9)", '\'{"city": "Ro\'')),
        ('{"city": "Rome"', not_json("Expecting ',' delimiter: line 1 column 16 (char 15)", '\'{"city": "Rome"\'')),
        ('["Rome"]', not_json("it is a JSON array", "'[\"Rome\"]'")),
        ('"Rome"', not_json("it is a JSON string", "'\"Rome\"'")),
        ("null", not_json("it is a JSON null", "'null'")),
        ('{"city": NaN}', not_json("NaN is not JSON", "'{\"city\": NaN}'")),
        ('{"city": "a", "city": "b"}', not_json("the key 'city' occurs twice", '\'{"city": "a", "city": "b"}\'')),
        ("{}", wrong("city: required, but missing")),
        ('{"city": "Rome", "dais": 2}', wrong("dais: no such parameter")),
        ('{"city": "Rome", "days": "2"}', wrong("days: Input should be a valid integer; received '2'")),
        ('{"city": null}', wrong("city: Input should be a valid string; received None")),
        (
            '{"city": 3, "days": 1.5}',
            wrong(
                "city: Input should be a valid string; received 3",
                "days: Input should be a valid integer; received 1.5",
            ),
        ),
    ],
)
async def test_malformed_arguments(arguments: str, words: str) -> None:
    text, failure = await seen(ToolRegistry([weather]), "weather", arguments)
    assert text == words
    assert failure in (Failure.BAD_JSON, Failure.INVALID_ARGUMENTS)


async def test_an_unknown_tool() -> None:
    registry = ToolRegistry([weather, hangs])
    assert await seen(registry, "wether", "{}") == (
        "There is no tool named 'wether'. Did you mean 'weather'? Available tools: hangs, weather.",
        Failure.UNKNOWN_TOOL,
    )


async def test_tools_that_fail() -> None:
    registry = ToolRegistry([hangs, breaks, refuses, odd])
    assert await seen(registry, "hangs", "{}") == (
        "hangs was stopped after 0.05 s without a result. Ask for less at once.",
        Failure.TIMEOUT,
    )
    assert await seen(registry, "breaks", "{}") == ("breaks failed with KeyError: 'secret path'", Failure.CRASHED)
    assert await seen(registry, "refuses", "{}") == (
        "The city is unknown; try a larger one nearby.",
        Failure.REFUSED,
    )
    text, failure = await seen(registry, "odd", "{}")
    assert text.startswith("odd failed with TypeError: the tool returned a value that cannot be written as JSON")
    assert failure is Failure.CRASHED


async def test_the_three_readers_get_words_of_their_own() -> None:
    result = await ToolRegistry([refuses]).execute(ToolCall("c", "refuses", "{}"))
    assert (result.model, result.user, result.debug) == (
        "The city is unknown; try a larger one nearby.",
        "no such city",
        "row 7",
    )
    crashed = await ToolRegistry([breaks]).execute(ToolCall("c", "breaks", "{}"))
    assert "Traceback" in crashed.debug and "Traceback" not in crashed.model


async def test_commands_and_paths(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    settings = ShellSettings(output_bytes=20, max_output_bytes=100_000)
    registry = ToolRegistry([*file_tools(tmp_path), shell_tool(tmp_path, settings)])
    told = {
        "run_command": [
            ('{"command": "kill -9 $$"}', "[killed by SIGKILL]", None),
            ('{"command": "exit 3"}', "[exit code 3]", None),
            ('{"command": "sleep 60", "timeout_s": 1}', "[stopped after 1 s; give timeout_s to allow more]", "timeout"),
            (
                '{"command": "printf %050d 7"}',
                f"{'0' * 10}\n[... 30 bytes omitted ...]\n{'0' * 9}7\n[exit code 0]",
                None,
            ),
            (
                '{"command": "yes"}',
                "[stopped after writing more than 100000 bytes; redirect the output to a file]",
                "refused",
            ),
        ],
        "read_file": [
            (
                '{"path": "../x"}',
                "path '../x' contains '..'; use a path relative to the working directory",
                "refused",
            ),
            (
                '{"path": "/etc/passwd"}',
                "path '/etc/passwd' is outside of the working directory; use a path relative to it",
                "refused",
            ),
            (
                '{"path": "link/passwd"}',
                "'link/passwd' leads through something that is not a directory, or through a symbolic link",
                "refused",
            ),
            ('{"path": "none"}', "'none' does not exist", "refused"),
        ],
    }
    for name, cases in told.items():
        for arguments, words, failure in cases:
            text, kind = await seen(registry, name, arguments)
            assert text == words or (failure == "refused" and text.endswith(words)), arguments
            assert kind == failure, arguments


async def test_an_approval_hook_that_crashes() -> None:
    async def broken(_: ApprovalRequest) -> bool:
        raise RuntimeError("database is down")

    assert await seen(ToolRegistry([weather], approve=broken), "weather", '{"city": "Rome"}') == (
        "weather was not run: the check that must approve it failed. Do not try to reach the same by other means; "
        "go on without it, or ask the user.",
        Failure.DENIED,
    )


def test_calls_the_loop_does_not_run() -> None:
    call = ToolCall("c", "weather", "{}")
    assert cut_off(call, "length").model == (
        "Not run: your message was cut off (finish reason 'length'), and a call in it may be incomplete. "
        "Make the call again, with shorter arguments or in several smaller calls."
    )
    assert cancelled(call).model == (
        "Interrupted before there was a result. The call may have taken effect in part; check before you repeat it."
    )
    assert over_budget(call).model == "Not run: the tool calls allowed for this task are used up."
