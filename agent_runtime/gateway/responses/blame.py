"""Faults that are found in the chat body, told in the words of the Responses request it was made from."""

import re
from dataclasses import dataclass
from typing import Any

from agent_runtime.gateway.errors import ApiError

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")
_TOOL = re.compile(r"\b(tools\[\d+\])\.function\b")
_RENAMED = (
    (re.compile(r"^thinking\b"), "reasoning.effort"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
)


@dataclass(frozen=True, slots=True)
class Blame:
    """``places`` has for each chat message the index of its first item in the whole conversation, None for the
    instructions; the first ``before`` items are not in the request but in the response it continues.
    """

    places: tuple[int | None, ...]
    before: int

    def error(self, error: ApiError) -> ApiError:
        """The same error about the request's own fields."""
        param = None if error.param is None else self._path("input" if error.param == "messages" else error.param)
        told = ApiError(
            error.status,
            self._path(error.message),
            code=error.code,
            param=param,
            type=error.type,
            headers=error.headers,
        )
        told.__cause__ = error
        return told

    def notes(self, notes: dict[str, Any]) -> dict[str, Any]:
        """The extension object ``k3``, in which messages are counted as items of the whole conversation."""
        replay = dict(notes["replay"])
        if "turns" in replay:
            replay["turns"] = [{**turn, "index": self._item(turn["index"])} for turn in replay["turns"]]
        prefix = replay.get("prefix")
        if prefix is not None and prefix.get("index") is not None:
            replay["prefix"] = {**prefix, "index": self._item(prefix["index"])}
        return {**notes, "replay": replay}

    def _item(self, message: int) -> int | None:
        """Item of a message; None for the instructions and for what is not there."""
        return self.places[message] if message < len(self.places) else None

    def _path(self, text: str) -> str:
        text = _TOOL.sub(r"\1", _MESSAGE.sub(lambda found: self._place(int(found.group(1))), text))
        for pattern, name in _RENAMED:
            text = pattern.sub(name, text)
        return text

    def _place(self, message: int) -> str:
        item = self._item(message)
        if item is None:
            return "instructions"
        return f"input[{item - self.before}]" if item >= self.before else "previous_response_id"
