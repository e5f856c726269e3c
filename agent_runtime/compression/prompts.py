"""The words of a compression: the instruction for the summary, and the message that carries it into the next window."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

_HEAD: Final = (
    "[Summary of the work so far, written by you before the conversation was shortened. "
    "These are notes, not proof: check what matters before you rely on it.]"
)
_SHORTER: Final = "\n\nYour last attempt was cut off at the output limit: think less and write at most half as much."


@cache
def _instruction() -> str:
    return files("agent_runtime.compression").joinpath("instruction.md").read_text(encoding="utf-8").strip()


def instruction(*, shorter: bool = False) -> str:
    """The user message that asks for the summary; `shorter` after one that was cut off."""
    return _instruction() + (_SHORTER if shorter else "")


def summary_message(summary: str, attachments: Sequence[str], pointer: str) -> str:
    """The user message that stands for what was summarised.

    Args:
        summary: the model's text.
        attachments: what the program knows exactly and the model need not remember, such as an open plan.
        pointer: how to look up the exact text of what is gone; "" when there is no way.
    """
    return "\n\n".join(part.strip() for part in (_HEAD, summary, *attachments, pointer) if part.strip())


def elision_note(tokens: int) -> str:
    """The message in the place of user messages that were left out."""
    return f"[{tokens} tokens of earlier user messages are left out here.]"


def recovery_pointer(messages: int, tool: str) -> str:
    """Tells the model how to read what is gone. Messages of a session are numbered from 1."""
    return (
        f"[The exact text of messages 1 to {messages} of this session can be looked up with the tool {tool}. "
        "Use it when you need a detail that is not in the summary.]"
    )
