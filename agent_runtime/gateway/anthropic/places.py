"""Where the client wrote what stands in the chat body: errors and verdicts name the client's own positions."""

import re
from dataclasses import dataclass, field

_POSITION = re.compile(r"\bmessages\[(\d+)\](?:\.content\[(\d+)\])?")
_FIELDS = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("max_completion_tokens", "max_tokens"),
    ("metadata.session_id", "metadata.user_id"),
    ("reasoning_effort", "output_config.effort"),
    ("response_format", "output_config.format"),
    ("tool_choice.function.name", "tool_choice.name"),
    ("function.parameters", "input_schema"),
    ("function.name", "name"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("stop", "stop_sequences"),
)
"""Fields of chat completions and what they are called here; longer ones first."""
_FIELD = re.compile("|".join(rf"\b{re.escape(name)}\b" for name, _ in _FIELDS))
_NAMES = dict(_FIELDS)


@dataclass(slots=True)
class Places:
    """Paths in the client's body, as its API spells them, of the messages and parts of the chat body."""

    messages: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Path of each message, and the number of the client's message that it came from; that of the next one for
    `system`."""
    parts: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    """Paths of content parts by message and part of the chat body."""

    def number(self, index: int) -> int:
        """The client's message that a message of the chat body came from; behind the last, the one behind its last."""
        if index < len(self.messages):
            return self.messages[index][1]
        return self.messages[-1][1] + 1 if self.messages else 0

    def translated(self, text: str) -> str:
        """A message with the client's paths and field names in the place of those of the chat body."""
        return _FIELD.sub(lambda found: _NAMES[found[0]], self.paths(text))

    def paths(self, text: str) -> str:
        """A message with the client's paths in the place of those of the chat body."""
        return _POSITION.sub(self._path, text)

    def _path(self, found: re.Match[str]) -> str:
        message = int(found[1])
        if message >= len(self.messages):
            return found[0]
        if found[2] is None:
            return self.messages[message][0]
        return self.parts.get((message, int(found[2])), self.messages[message][0])
