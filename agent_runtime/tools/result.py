"""What a tool call came to: text for three readers, and the kinds of failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Failure(StrEnum):
    """Why a call did not do its work. A failure is a value the loop carries on with, never an exception."""

    UNKNOWN_TOOL = "unknown_tool"
    BAD_JSON = "bad_json"
    INVALID_ARGUMENTS = "invalid_arguments"
    REFUSED = "refused"
    DENIED = "denied"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    CUT_OFF = "cut_off"
    REPEATED = "repeated"


class ToolError(Exception):
    """Raised by a tool that cannot do what it was asked; `str(error)` is what the model reads.

    Any other exception is a defect of the tool: the model then learns its type and message, and the
    traceback goes to the debug text only.
    """

    def __init__(self, model: str, *, user: str | None = None, debug: str = "") -> None:
        super().__init__(model)
        self.user = user
        self.debug = debug


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one call, worded separately for each of its readers."""

    model: str
    """Goes into the conversation. Says what happened and, on failure, what to do differently."""
    user: str = ""
    """One line for the person watching; defaults to the first line of `model`."""
    debug: str = ""
    """For logs: tracebacks and raw input. Never shown to the model."""
    failure: Failure | None = None
    """None when the tool did its work."""
    full: str | None = None
    """The whole text when `model` had to be cut, so that it can be kept elsewhere and looked up."""

    def __post_init__(self) -> None:
        # Bytes that are no UTF-8 reach Python text as lone surrogates; a request cannot carry those.
        for name in ("model", "user", "debug"):
            text: str = getattr(self, name)
            object.__setattr__(self, name, text.encode("utf-8", "replace").decode("utf-8"))
        if not self.user:
            object.__setattr__(self, "user", one_line(self.model))

    @property
    def ok(self) -> bool:
        """Whether the tool did its work."""
        return self.failure is None

    def with_note(self, note: str) -> ToolResult:
        """The same outcome with a note from the runtime below the text for the model."""
        return replace(self, model=f"{self.model}\n\n{note}")

    def capped(self, limit_bytes: int) -> ToolResult:
        """The same outcome with the text for the model held to `limit_bytes`."""
        cut = cut_middle(self.model, limit_bytes)
        return self if cut == self.model else replace(self, model=cut, full=self.model)


def one_line(text: str, limit_chars: int = 100) -> str:
    """The first non-empty line of `text`, cut to `limit_chars` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit_chars else line[: limit_chars - 1] + "…"


def cut_middle(text: str, limit_bytes: int) -> str:
    """`text` if its UTF-8 form fits into `limit_bytes`, else its head and tail around a note of what is
    missing."""
    raw = text.encode("utf-8")
    if len(raw) <= limit_bytes:
        return text
    half = limit_bytes // 2
    return join_cut(raw[:half], raw[len(raw) - half :], len(raw) - 2 * half)


def join_cut(head: bytes, tail: bytes, omitted_bytes: int) -> str:
    """Text of a cut output. A character the cut went through is dropped with the omitted part."""
    note = f"\n[... {omitted_bytes} bytes omitted ...]\n" if omitted_bytes else ""
    if not omitted_bytes:
        return (head + tail).decode("utf-8", "replace")
    return head.decode("utf-8", "ignore") + note + tail.decode("utf-8", "ignore")
