"""A completion in the words of the Responses API: events of a stream, or the response as one object."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from starlette.responses import Response

from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.completion import Began, ChoiceEnd, Facts, NewDelta, Progress, WireForm
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.notes import completion_notes, turn_notes
from agent_runtime.gateway.responses.blame import Blame
from agent_runtime.gateway.responses.encode import TurnEncoder, ended, usage_object
from agent_runtime.gateway.responses.response import Json, cancelled, failed
from agent_runtime.gateway.sse import KEEP_ALIVE_COMMENT, event
from k3_sglang.chat.events import CallArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta

_FINAL_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class ResponsesWire:
    """One response. ``response`` is what it is now; ``changed`` is called with it when it is over."""

    protocol: WireForm = "responses"
    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(
        self, facts: Facts, response: Json, blame: Blame, *, shows_signature: bool, changed: Callable[[Json], None]
    ) -> None:
        self.response: Json = response
        self._facts = facts
        self._blame = blame
        self._changed = changed
        self._turn = TurnEncoder(facts.token, facts.signatures[0] if shows_signature else None)
        self._sent = 0

    @property
    def id(self) -> str:
        """The response's id."""
        return self.response["id"]

    def headers(self) -> Mapping[str, str]:
        """None of its own."""
        return {}

    def events(self, item: Progress) -> bytes:
        """The response when it begins, then its items as they grow."""
        if isinstance(item, Began):
            kinds = ("response.created", "response.in_progress")
            return self._stream({"type": kind, "response": self.response} for kind in kinds)
        if isinstance(item, NewDelta):
            return self._stream(self._turn.feed(item.event))
        return self._stream(self._turn.end(item))

    def last_events(self, ends: Sequence[ChoiceEnd]) -> bytes:
        """The whole response."""
        self._finish(ends[0])
        return self._final()

    def failure_events(self, error: ApiError) -> bytes:
        """The response with its error."""
        self._turn.leave()
        self._fail(error, self._turn.output)
        return self._final()

    def whole(self, ends: Sequence[ChoiceEnd]) -> Json:
        """The response as one object."""
        for said in _events_of(ends[0].delivered):
            for _ in self._turn.feed(said):
                pass
        for _ in self._turn.end(ends[0]):
            pass
        self._finish(ends[0])
        return self.response

    def refusal(self, error: ApiError) -> Response:
        """OpenAI's envelope, about this request's own fields."""
        self._fail(error, [])
        return self._blame.error(error).response()

    def fail(self, error: ApiError) -> None:
        """It failed, and nobody is to be told now."""
        self._fail(error, [])

    def left(self) -> None:
        """Nobody waits for it any more; nothing happens when it is over already."""
        if self.response["status"] == "in_progress":
            self.response = cancelled(self.response)
            self._changed(self.response)

    def _finish(self, end: ChoiceEnd) -> None:
        # A call that was cut or malformed is not among them: many a client runs whatever call it finds here.
        output = [
            item for item in self._turn.output if (item["type"], item["status"]) != ("function_call", "incomplete")
        ]
        notes = self._blame.notes(completion_notes(self._facts, end.usage))
        self.response = {
            **self.response,
            **ended(end),
            "completed_at": int(time.time()),
            "output": output,
            "usage": usage_object(end.usage),
            "k3": {**notes, **turn_notes(end.delivered)},
        }
        self._changed(self.response)

    def _fail(self, error: ApiError, output: list[Json]) -> None:
        self.response = {**failed(self.response, self._blame.error(error)), "output": output}
        self._changed(self.response)

    def _final(self) -> bytes:
        return self._stream([{"type": _FINAL_EVENTS[self.response["status"]], "response": self.response}])

    def _stream(self, events: Iterable[Json]) -> bytes:
        sent = b""
        for said in events:
            sent += event({**said, "sequence_number": self._sent}, said["type"])
            self._sent += 1
        return sent


def _events_of(delivered: Delivered) -> Sequence[Event]:
    """What a stream would have said, each thing in one piece."""
    message = delivered.message
    events: list[Event] = []
    if message.reasoning:
        events.append(ReasoningDelta(message.reasoning))
    if isinstance(message.content, str) and message.content:
        events.append(ContentDelta(message.content))
    for index, call in enumerate(message.tool_calls):
        events += [
            CallStart(index, call.id, call.name),
            CallArgumentsDelta(index, call.arguments),
            CallEnd(index, call.arguments, True),
        ]
    for call in delivered.incomplete_calls:
        events += [CallStart(call.index, call.id, call.name), CallEnd(call.index, "", False)]
    return events
