"""Identical calls are told apart from polling and from progress."""

import pytest

from agent_runtime.conversation import ToolCall
from agent_runtime.repeats import RepeatGuard, RepeatLimits
from agent_runtime.tools.result import Failure, ToolResult

LOOK = ToolCall("a", "look", '{"at": 1, "x": 2}')
TESTS = ToolCall("b", "run_command", '{"command": "make test"}')


def repeat(guard: RepeatGuard, call: ToolCall, times: int, *, text: str = "same", changes_state: bool = False) -> None:
    """Make the call `times` times, as the loop does; it must not be refused."""
    for _ in range(times):
        assert guard.refusal(call) is None
        guard.observe(call, ToolResult(text), changes_state=changes_state)


def test_reminder_refusal_and_end_come_at_their_counts() -> None:
    guard = RepeatGuard(RepeatLimits(remind_at=2, refuse_at=3, stop_at=4))
    assert guard.observe(LOOK, ToolResult("same"), changes_state=False).model == "same"
    assert "same result 2 times" in guard.observe(LOOK, ToolResult("same"), changes_state=False).model
    refused = guard.refusal(LOOK)
    assert refused is not None and refused.failure is Failure.REPEATED
    assert refused.model.endswith("\n\nsame") and not guard.exhausted
    assert guard.refusal(LOOK) is not None and guard.exhausted


def test_a_call_whose_result_keeps_changing_is_polling_and_never_refused() -> None:
    guard = RepeatGuard()
    for number in range(50):
        repeat(guard, LOOK, 1, text=f"line {number}")
    assert not guard.exhausted


def test_key_order_and_white_space_do_not_hide_a_repetition() -> None:
    guard = RepeatGuard()
    repeat(guard, LOOK, 3)
    assert guard.refusal(ToolCall("z", "look", '{"x":2,   "at":1}')) is not None
    assert guard.refusal(ToolCall("z", "look", '{"x":2, "at":2}')) is None


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    guard = RepeatGuard()
    broken = ToolCall("a", "look", '{"at"')
    repeat(guard, broken, 3)
    assert guard.refusal(broken) is not None


@pytest.mark.parametrize(
    ("edit", "result", "may_run"),
    [
        ('{"new": 2}', ToolResult("written"), True),
        ('{"new": 2}', ToolResult("no such file", failure=Failure.REFUSED), False),
        ('{"new": 1}', ToolResult("written"), False),
    ],
    ids=["new-edit", "failed-edit", "same-edit"],
)
def test_only_a_new_edit_that_succeeds_allows_the_tests_to_run_again(
    edit: str, result: ToolResult, may_run: bool
) -> None:
    guard = RepeatGuard()
    guard.observe(ToolCall("e", "edit", '{"new": 1}'), ToolResult("written"), changes_state=True)
    repeat(guard, TESTS, 3, changes_state=True)
    guard.observe(ToolCall("e", "edit", edit), result, changes_state=True)
    assert (guard.refusal(TESTS) is None) is may_run
