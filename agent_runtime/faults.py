"""What can be wrong with a complete answer: empty, a call outside of the calls, thinking in the wrong channel."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import StrEnum

from agent_runtime.conversation import AssistantTurn


class Fault(StrEnum):
    """Why an answer is not usable as it is."""

    EMPTY = "empty"
    """No text and no call: nothing at all, or thinking that holds the answer or ends before it."""
    SWALLOWED_CALL = "swallowed_call"
    """A call of a known tool stands in the thinking or the text; whoever parsed the turn lost it."""
    LEAKED_MARKERS = "leaked_markers"
    """Control tokens of the turn format stand in the text."""
    THINKING_AS_TEXT = "thinking_as_text"
    """There is no thinking, and the text is thinking."""
    MISFIRED = "misfired"
    """Every call names an unknown tool or has wrong arguments."""


# K3's markers, and the same without bars as some servers spell them when they strip special tokens.
_CALL = re.compile(r"<\|?open\|?>\s*call\s+tool=\"([^\"<>]{1,128})\"")
_MARKER = re.compile(r"<\|(?:open|close|sep|end_of_msg)\|>")
_THOUGHT = re.compile(
    r"\s*(?:<think>|(?:The user (?:is|wants|asks|asked|has)|I should|Let me think|Okay, (?:so|the))\b)"
)


def find_fault(turn: AssistantTurn, tools: Collection[str]) -> Fault | None:
    """What is wrong with a turn that came to its own end; None for a good turn and for one that was cut.

    Whether text is thinking is judged by how it begins, and only where no thinking came: a model that thinks always
    puts it there. A wrong judgement costs one retry.
    """
    if turn.tool_calls or turn.finish_reason not in ("stop", "tool_calls"):
        return None
    if any(found in tools for text in (turn.reasoning, turn.content) for found in _CALL.findall(text)):
        return Fault.SWALLOWED_CALL
    if not turn.content.strip():
        return Fault.EMPTY
    if _MARKER.search(turn.content):
        return Fault.LEAKED_MARKERS
    if not turn.reasoning and _THOUGHT.match(turn.content):
        return Fault.THINKING_AS_TEXT
    return None
