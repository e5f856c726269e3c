"""One choice of a completion: output ids in, deltas and the delivered message out; no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agent_runtime.engine.types import Finish
from agent_runtime.gateway.stops import StopFinder
from agent_runtime.ledger.call_ids import new_call_id
from k3_sglang.chat.events import (
    CallArgumentsDelta,
    CallEnd,
    CallStart,
    ContentBreak,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel, Message, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class IncompleteCall:
    """A call that was cut or malformed; it must not be executed."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a client has got in the end.

    ``message`` holds complete calls only. ``ids`` are the output ids when the turn is whole and ``message`` says
    all of it, so that it may be replayed from them; else None. ``output_ids`` are all that were generated.
    ``warnings`` are the parser's codes.
    ``schema_problems`` says where a whole turn breaks a schema that its grammar could not hold it to. ``stop`` is the
    stop string that ended it.
    """

    message: Message
    finish_reason: FinishReason
    completion_tokens: int
    reasoning_tokens: int
    incomplete_calls: tuple[IncompleteCall, ...]
    warnings: tuple[str, ...]
    ids: tuple[int, ...] | None
    output_ids: tuple[int, ...]
    schema_problems: tuple[str, ...] = ()
    stop: str | None = None


class Choice:
    """Follows one generation; with ``calls_allowed`` False the turn's calls are dropped, as if never made."""

    def __init__(
        self, tokenizer: K3Tokenizer, start: Channel, *, calls_allowed: bool, stops: Sequence[str] = ()
    ) -> None:
        self._parser = TurnParser(tokenizer, start=start, new_call_id=new_call_id, calls_allowed=calls_allowed)
        self._end_of_msg = tokenizer.special.end_of_msg
        self._is_special = tokenizer.is_special
        self._finder = StopFinder(stops)
        self._ids: list[int] = []
        self._content: list[str] = []
        self._calls_told = 0
        self._reasoning_tokens = 0
        self._in_reasoning = start == "think"

    @property
    def stopped(self) -> bool:
        """Whether the caller is to end the generation: nothing more of it will be delivered.

        Either a stop string is complete, or the model wrote a control token that no turn contains.
        """
        if self._finder.found is not None:
            return True
        return self._parser.done and not self._parser.turn.finished

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Deltas that new output ids make visible."""
        self._ids.extend(ids)
        self._count_reasoning(ids)
        return self._deltas(self._parser.feed(ids))

    def finish(self, finish: Finish | None) -> tuple[list[Event], Delivered]:
        """The last deltas and the result. ``finish`` is the engine's word, None if ``stopped`` came first."""
        cut = finish is not None and finish.type == "length"
        if self._finder.found is not None:
            return [], self._delivered(cut=False)
        if finish is not None and finish.matched == self._end_of_msg and self._ids[-1:] != [self._end_of_msg]:
            self._ids.append(self._end_of_msg)  # an engine may keep the stop id to itself
        deltas = self._deltas(self._parser.finish("length" if cut else "stop"))
        self._show(self._finder.finish(), deltas)
        return deltas, self._delivered(cut=cut)

    def _deltas(self, events: Sequence[Event]) -> list[Event]:
        # A cut call must not be made to look whole: what the parser adds to close it is not delivered.
        cut = {event.index for event in events if isinstance(event, CallEnd) and not event.complete}
        deltas: list[Event] = []
        for event in events:
            if self._finder.found is not None:
                break
            match event:
                case ContentDelta(text):
                    self._show(self._finder.feed(text), deltas)
                case ContentBreak():
                    self._show(self._finder.finish(), deltas)
                case CallStart():
                    self._show(self._finder.finish(), deltas)
                    deltas.append(event)
                case CallArgumentsDelta(index) if index in cut:
                    pass
                case ReasoningDelta() | CallArgumentsDelta() | CallEnd():
                    deltas.append(event)
                    self._calls_told += isinstance(event, CallEnd)
        return deltas

    def _show(self, text: str, deltas: list[Event]) -> None:
        if text:
            self._content.append(text)
            deltas.append(ContentDelta(text))

    def _count_reasoning(self, ids: Sequence[int]) -> None:
        if not self._in_reasoning:
            return
        for position, token in enumerate(ids):
            if self._is_special(token):
                self._in_reasoning = False
                self._reasoning_tokens += position
                return
        self._reasoning_tokens += len(ids)

    def _delivered(self, *, cut: bool) -> Delivered:
        turn = self._parser.turn
        stop_found = self._finder.found is not None
        # A client of a stream has the calls before a stop string, and none behind it.
        calls = turn.calls[: self._calls_told] if stop_found else turn.calls
        complete = tuple(ToolCall(call.id, call.name, call.arguments) for call in calls if call.complete)
        incomplete = tuple(
            IncompleteCall(index, call.id, call.name) for index, call in enumerate(calls) if not call.complete
        )
        message = Message(
            role="assistant",
            content="".join(self._content),
            reasoning=turn.reasoning,
            tool_calls=complete,
        )
        finish_reason: FinishReason = "length" if cut else "tool_calls" if complete else "stop"
        said_all = turn.finished and not (cut or stop_found or incomplete or "calls_not_allowed" in turn.warnings)
        return Delivered(
            message=message,
            finish_reason=finish_reason,
            completion_tokens=len(self._ids),
            reasoning_tokens=self._reasoning_tokens,
            incomplete_calls=incomplete,
            warnings=turn.warnings,
            ids=self._whole_ids() if said_all else None,
            output_ids=tuple(self._ids),
            stop=self._finder.found,
        )

    def _whole_ids(self) -> tuple[int, ...] | None:
        """All ids if the model itself ended the message, once and with nothing behind, else None."""
        is_whole = self._end_of_msg in self._ids and self._ids.index(self._end_of_msg) == len(self._ids) - 1
        return tuple(self._ids) if is_whole else None
