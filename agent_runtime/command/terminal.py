"""How a chat looks in the terminal: thinking dimmed, text as it comes, one line for each tool and step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from rich.console import Console
from rich.text import Text

from agent_runtime.conversation import ContentDelta, ReasoningDelta
from agent_runtime.events import (
    CompressionFinished,
    CompressionStarted,
    Event,
    RunResult,
    StepFinished,
    StepRetried,
    ToolFinished,
    ToolStarted,
)
from agent_runtime.tools.approval import ApprovalRequest, Approve
from agent_runtime.tools.result import one_line

Channel = Literal["", "thinking", "text"]


class Screen:
    """Prints what a run does. Whatever a model or a tool wrote is printed as text, never as markup or control codes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._channel: Channel = ""

    def ask(self) -> str:
        """A line from the user. Raises EOFError at the end of the input."""
        return self._console.input("[bold]> [/bold]")

    def say(self, text: str, style: str = "dim") -> None:
        """A line of its own."""
        self._leave()
        self._console.print(Text(_visible(text), style), soft_wrap=True)

    def show(self, event: Event) -> None:
        """One event of a run."""
        if isinstance(event, ReasoningDelta):
            self._stream("thinking", event.text)
        elif isinstance(event, ContentDelta):
            self._stream("text", event.text)
        elif isinstance(event, ToolStarted):
            self.say(f"→ {event.call.name} {one_line(event.call.arguments)}", "cyan")
        elif isinstance(event, ToolFinished):
            self.say(f"← {event.result.user}", "green" if event.result.ok else "red")
        elif isinstance(event, StepRetried):
            self.say(f"asking again: {event.reason}", "yellow")
        elif isinstance(event, CompressionStarted):
            self.say(f"compressing the history ({event.context_tokens} tokens)", "yellow")
        elif isinstance(event, CompressionFinished):
            self.say(f"{event.outcome}: {event.before_tokens} → {event.after_tokens} tokens. {event.reason}", "yellow")
        elif isinstance(event, StepFinished):
            step = event.record
            self.say(f"step {step.step}: prompt {step.prompt_tokens}, cached {step.cached_tokens}")

    def end(self, result: RunResult) -> None:
        """How a run ended; nothing when the answer has been shown already."""
        self._leave()
        if not result.completed:
            self.say(f"ended: {result.status}", "yellow")

    def approval(self, names: Collection[str]) -> Approve:
        """A hook that asks the user before one of these tools runs; no answer is a no."""

        def approve(request: ApprovalRequest) -> bool:
            if request.tool not in names:
                return True
            self.say(f"{request.tool} {one_line(str(dict(request.arguments)), 500)}", "bold")
            try:
                return self._console.input("run it? [y/N] ", markup=False).strip().lower() in ("y", "yes")
            except EOFError:
                return False

        return approve

    def _stream(self, channel: Channel, text: str) -> None:
        if self._channel != channel:
            self._leave()
            self._channel = channel
        style = "dim italic" if channel == "thinking" else ""
        self._console.print(Text(_visible(text), style), end="", soft_wrap=True)

    def _leave(self) -> None:
        if self._channel:
            self._channel = ""
            self._console.print()


def _visible(text: str) -> str:
    """Text without what a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
