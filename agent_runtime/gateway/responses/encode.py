"""A generated turn as output items of a response, event by event in the API's order; pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from agent_runtime.gateway.completion import ChoiceEnd, Usage
from agent_runtime.gateway.responses.item_ids import Kind, item_id
from k3_sglang.chat.events import CallArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta

Json = dict[str, Any]


class TurnEncoder:
    """Follows one turn. ``output`` holds its items, finished ones with their status.

    ``token`` is what ids are made from, ``signature`` what reasoning items carry as ``encrypted_content``, if
    anything. Events have no ``sequence_number`` yet.
    """

    def __init__(self, token: str, signature: str | None) -> None:
        self.output: list[Json] = []
        self._token = token
        self._signature = signature
        self._text: list[str] = []
        self._is_open = False

    def feed(self, event: Event) -> Iterator[Json]:
        """The events of a stream that say it."""
        match event:
            case ReasoningDelta(text):
                yield from self._more_text("reasoning", text)
            case ContentDelta(text):
                yield from self._more_text("message", text)
            case CallStart(_, call_id, name):
                yield from self._close("completed")
                item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                yield self._open("fc", item)
            case CallArgumentsDelta(_, piece):
                self._text.append(piece)
                yield self._at("response.function_call_arguments.delta", delta=piece)
            case CallEnd():
                yield from self._close("completed" if event.complete else "incomplete")
            case _:
                pass

    def end(self, end: ChoiceEnd) -> Iterator[Json]:
        """The events that close the turn; a whole turn without text and calls gets an empty message."""
        cut = end.delivered.finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        if not cut and not any(item["type"] != "reasoning" for item in self.output):
            yield from self._more_text("message", "")
            yield from self._close("completed")

    def leave(self) -> None:
        """The turn ends here, with nothing more to say about it."""
        for _ in self._close("incomplete"):
            pass

    def _more_text(self, kind: str, text: str) -> Iterator[Json]:
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._close("completed")
            item: Json = {"type": "message", "role": "assistant", "content": []}
            if kind == "reasoning":
                item = {"type": "reasoning", "summary": [], "content": []}
            yield self._open("rs" if kind == "reasoning" else "msg", item)
            yield self._at("response.content_part.added", content_index=0, part=_part(kind, ""))
        if text:
            self._text.append(text)
            more: Json = {} if kind == "reasoning" else {"logprobs": []}
            yield self._at(f"response.{_part_type(kind)}.delta", content_index=0, delta=text, **more)

    def _open(self, kind: Kind, item: Json) -> Json:
        name = item_id(kind, self._token, len(self.output))
        self.output.append({"id": name, **item, "status": "in_progress"})
        self._text = []
        self._is_open = True
        return self._event("response.output_item.added", item=dict(self.output[-1]))

    def _close(self, status: str) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        item = {**self.output[-1], "status": status}
        text = "".join(self._text)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._at("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            kind = item["type"]
            item["content"] = [_part(kind, text)]
            more: Json = {} if kind == "reasoning" else {"logprobs": []}
            yield self._at(f"response.{_part_type(kind)}.done", content_index=0, text=text, **more)
            yield self._at("response.content_part.done", content_index=0, part=_part(kind, text))
            if kind == "reasoning" and self._signature is not None:
                item["encrypted_content"] = self._signature
        self.output[-1] = item
        yield self._event("response.output_item.done", item=item)

    def _at(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **more}

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "output_index": len(self.output) - 1, **more}


def _part_type(kind: str) -> str:
    return "reasoning_text" if kind == "reasoning" else "output_text"


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_object(usage: Usage) -> Json:
    """``usage`` as this API has it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def without_signatures(output: list[Json]) -> list[Json]:
    """Items as they are shown to who did not ask for ``encrypted_content``."""
    return [{key: value for key, value in item.items() if key != "encrypted_content"} for item in output]


def ended(end: ChoiceEnd) -> Mapping[str, Any]:
    """Status of a response and, of one that was cut, why."""
    if end.delivered.finish_reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}
