"""Another server's stream to the events of a turn and the turn that is kept; no I/O."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from agent_runtime.upstream.call import Call, is_complete
from agent_runtime.upstream.errors import not_understood
from agent_runtime.upstream.pieces import ThinkTags, WholeCharacters
from agent_runtime.upstream.profiles import Profile
from k3_sglang.chat.events import CallArgumentsDelta, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from k3_sglang.chat.types import Message, ToolCall

_MARKERS = ("<|open|>", "<|close|>", "<|sep|>")
_FINISHES = ("stop", "length", "tool_calls")
_THINKING_FIELDS = ("reasoning_content", "reasoning")


class StopStrings(Protocol):
    """What finds stop strings in visible text: see `gateway.stops`."""

    found: str | None

    def feed(self, text: str) -> str:
        """Text that may be shown."""
        ...

    def finish(self) -> str:
        """Text held back."""
        ...


@dataclass(frozen=True, slots=True)
class Counts:
    """The server's token counts; what it does not tell is 0."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReceivedTurn:
    """A turn as it was received. ``message`` holds the complete calls, ``incomplete`` are the others: place, id, name.

    ``whole`` says that the model ended it and ``message`` says all of it. ``warnings`` name what was put right or
    looks wrong. ``stop`` is the stop string that ended it.
    """

    message: Message
    finish: str
    incomplete: tuple[tuple[int, str, str], ...]
    counts: Counts
    whole: bool
    warnings: tuple[str, ...]
    stop: str | None = None


class TurnReader:
    """Reads one choice. Calls get ids of the gateway's own, because servers' ids repeat; theirs are kept.

    Events come one thing after the other, a call from its start to its end, because most protocols cannot say two at
    once: what a server sends in the middle of a call waits until that one is complete.
    """

    def __init__(
        self, profile: Profile, stops: StopStrings, *, calls_allowed: bool, new_call_id: Callable[[], str]
    ) -> None:
        self._profile = profile
        self._stops = stops
        self._calls_allowed = calls_allowed
        self._new_call_id = new_call_id
        self._tags = ThinkTags(enabled=profile.think_tags)
        self._thought, self._said = WholeCharacters(), WholeCharacters()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, Call] = {}
        self._told = 0
        self._complete: set[str] = set()
        self._open: Call | None = None
        self._waiting: list[Event] = []
        self._finish: str | None = None
        self._counts: Counts | None = None
        self._warnings: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether the finish reason has arrived; only counts may follow."""
        return self._finish is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: the caller ends the stream."""
        return self._stops.found is not None

    def feed(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Events of one object of the stream. Raises UpstreamError when it does not follow the API."""
        self._count(chunk.get("usage"))
        events: list[Event] = []
        for choice in _objects(chunk.get("choices"), "choices"):
            if choice.get("index", 0) != 0:
                raise not_understood(f"it has a choice with index {choice['index']!r}; one was asked for")
            self._count(choice.get("usage"))
            whole = choice.get("message")
            piece: Any = choice.get("delta") if whole is None else whole
            if piece is not None:
                self._read(_object(piece, "delta"), events, in_one=whole is not None)
            finish = choice.get("finish_reason")
            if finish is not None:
                self._finish = str(finish)
        return events

    def finish(self) -> tuple[list[Event], ReceivedTurn]:
        """The last events and the turn. Call when the stream has ended with a finish reason, or `stopped`."""
        events: list[Event] = []
        stopped = self.stopped
        if not stopped:
            thought, said = self._tags.finish()
            self._think(thought + self._thought.finish(), events)
            self._show(said + self._said.finish(), events)
            self._go_on(events, last=True)
            self._flush_stops(events)
        elif self._open is not None:
            self._end(self._open, events, cut=True)
        return events, self._turn(stopped=stopped)

    def _read(self, delta: Mapping[str, Any], events: list[Event], *, in_one: bool) -> None:
        if self.stopped:
            return
        thoughts = [text for name in self._thinking_fields() if isinstance(text := delta.get(name), str) and text]
        if thoughts:  # some servers send it under both names: the profile's counts
            self._think(self._thought.feed(thoughts[0]), events)
        content = delta.get("content")
        if isinstance(content, str):
            thought, said = self._tags.feed(content)
            if thought:
                self._warn("thinking_in_content")
                self._think(self._thought.feed(thought), events)
            self._show(self._said.feed(said), events)
        for place, piece in enumerate(_objects(delta.get("tool_calls"), "tool_calls")):
            index = piece.get("index", place if in_one else None)
            if not isinstance(index, int):
                raise not_understood(f"a piece of a tool call has the index {index!r}; it must be a number")
            self._add(index, piece, events)

    def _thinking_fields(self) -> tuple[str, ...]:
        first = self._profile.thinking_field
        return (first, *(name for name in _THINKING_FIELDS if name != first))

    def _add(self, index: int, piece: Mapping[str, Any], events: list[Event]) -> None:
        if index not in self._calls:
            self._calls[index] = Call(self._new_call_id())
            self._go_on(events)
        call = self._calls[index]
        call.id = call.id or str(piece.get("id") or "")
        function = _object(piece.get("function") or {}, "function")
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(name, str) and name:
            if call.place is None and not call.arguments:
                call.name += name
            elif name != call.name:  # some servers repeat it with every piece
                raise not_understood(f"the name of a tool call goes on ({name[:40]!r}) after its arguments began")
        if arguments is None or arguments == "":
            return
        if not isinstance(arguments, str):
            raise not_understood(f"arguments of a tool call are {type(arguments).__name__}; they must be text")
        if call.ended and arguments.strip():
            raise not_understood(f"the arguments of a tool call go on ({arguments[:40]!r}) after they were complete")
        if not call.ended:
            call.arguments.append(call.characters.feed(arguments))
            self._go_on(events)

    def _go_on(self, events: list[Event], *, last: bool = False) -> None:
        """Tell what can be told of the calls, one after the other; of all of them when they are the ``last``."""
        calls = [call for call in self._calls.values() if not call.ended] if self._calls_allowed else []
        for place, call in enumerate(calls, 1):
            follows = place < len(calls)
            if not (call.arguments or follows or last):
                return
            self._tell(call, events)
            self._argue(call, events)
            if not (last or (follows and call.is_over())):
                return
            self._end(call, events)

    def _tell(self, call: Call, events: list[Event]) -> None:
        """Announce a call: its name is whole when its arguments begin, another call begins, or the turn ends."""
        if call.place is not None:
            return
        if not call.name:
            raise not_understood("a tool call has no name")
        self._flush_stops(events)
        call.place, self._told = self._told, self._told + 1
        self._open = call
        events.append(CallStart(call.place, call.own_id, call.name))

    def _argue(self, call: Call, events: list[Event]) -> None:
        if call.place is None or len(call.arguments) == call.said:
            return
        # Held back as long as it may become the ``null`` of a call without arguments.
        if call.said or not "null".startswith("".join(call.arguments).strip()):
            events.append(CallArgumentsDelta(call.place, call.unsaid()))

    def _end(self, call: Call, events: list[Event], *, cut: bool = False) -> None:
        """Close the open call, and say what has waited for its end."""
        assert call.place is not None, "only a call that was told of is closed"
        call.ended, self._open = True, None
        if half := call.characters.finish():
            call.arguments.append(half)
            self._argue(call, events)
        text = call.text()
        complete = not cut and is_complete(text)
        if complete:
            self._complete.add(call.own_id)
        if complete and (rest := call.unsaid()):
            events.append(CallArgumentsDelta(call.place, "{}" if rest.strip() == "null" else rest))
        events.append(CallEnd(call.place, text, complete))
        events += self._waiting
        self._waiting = []

    def _say(self, event: Event, events: list[Event]) -> None:
        """An event that is none of a call's."""
        if self._open is not None and self._open.is_over():
            self._end(self._open, events)
        (events if self._open is None else self._waiting).append(event)

    def _think(self, text: str, events: list[Event]) -> None:
        if text:
            self._reasoning.append(text)
            self._say(ReasoningDelta(text), events)

    def _show(self, text: str, events: list[Event]) -> None:
        shown = self._stops.feed(text) if text else ""
        if shown:
            self._content.append(shown)
            self._say(ContentDelta(shown), events)

    def _flush_stops(self, events: list[Event]) -> None:
        held = self._stops.finish()
        if held:
            self._content.append(held)
            self._say(ContentDelta(held), events)

    def _turn(self, *, stopped: bool) -> ReceivedTurn:
        # Before a stop string too: a client of a stream has the calls that were told of.
        calls = [call for call in self._calls.values() if call.place is not None]
        complete = tuple(
            ToolCall(call.own_id, call.name, call.text(), call.id or None)
            for call in calls
            if call.own_id in self._complete
        )
        done = {call.id for call in complete}
        incomplete = tuple((call.place or 0, call.own_id, call.name) for call in calls if call.own_id not in done)
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        cut = self._finish == "length" and not stopped
        finish = "length" if cut else "tool_calls" if complete else "stop"
        dropped = bool(self._calls) and not self._calls_allowed
        self._look(content, reasoning, bool(calls), stopped=stopped, dropped=dropped)
        return ReceivedTurn(
            Message("assistant", content or (None if complete else ""), reasoning or None, complete),
            finish,
            incomplete,
            self._counts or Counts(),
            whole=not (cut or stopped or incomplete or dropped),
            warnings=tuple(self._warnings),
            stop=self._stops.found,
        )

    def _look(self, content: str, reasoning: str, calls: bool, *, stopped: bool, dropped: bool) -> None:
        """Note what looks wrong; nothing of it is changed."""
        if dropped:
            self._warn("calls_not_allowed")
        if self._finish is not None and self._finish not in _FINISHES:
            self._warn("content_filter" if self._finish == "content_filter" else "unknown_finish_reason")
        if any(marker in text for marker in _MARKERS for text in (content, reasoning)):
            self._warn("markers_in_text")
        if not (content or calls or stopped):
            self._warn("empty_answer")
        if self._counts is None:
            self._warn("usage_missing")

    def _warn(self, code: str) -> None:
        if code not in self._warnings:
            self._warnings.append(code)

    def _count(self, usage: Any) -> None:
        """The last counts win. Cached and reasoning tokens stand inside details, or beside the others."""
        if not isinstance(usage, Mapping):
            return
        given = cast("Mapping[str, Any]", usage)
        self._counts = Counts(
            _number(given, "prompt_tokens"),
            _number(given, "cached_tokens", "prompt_tokens_details"),
            _number(given, "completion_tokens"),
            _number(given, "reasoning_tokens", "completion_tokens_details"),
        )


def _number(usage: Mapping[str, Any], name: str, details: str = "") -> int:
    inner = usage.get(details)
    value = cast("Mapping[str, Any]", inner).get(name) if isinstance(inner, Mapping) else None
    value = usage.get(name) if value is None else value
    return value if isinstance(value, int) and value >= 0 else 0


def _objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise not_understood(f"{name} is {type(value).__name__}; it must be a list")
    return [_object(item, f"an entry of {name}") for item in cast("list[Any]", value)]


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise not_understood(f"{name} is {type(value).__name__}; it must be an object")
    return cast("Mapping[str, Any]", value)
