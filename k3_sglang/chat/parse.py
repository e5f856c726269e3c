"""K3's output to reasoning, content and tool calls: one incremental machine for every mode."""

import secrets
from collections.abc import Callable, Sequence
from typing import Literal

from k3_sglang.chat.call_stream import CallStream
from k3_sglang.chat.events import (
    ContentBreak,
    ContentDelta,
    Event,
    ParsedCall,
    ParsedTurn,
    ReasoningDelta,
    merge_deltas,
)
from k3_sglang.chat.lexer import Marker, TextLexer, TokenLexer
from k3_sglang.chat.parse_states import IN_CALL, ORDER, State
from k3_sglang.chat.tags import TagReader
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel


def new_call_id() -> str:
    """A tool-call id that says nothing about the call and cannot be guessed from any history."""
    return f"call_{secrets.token_hex(12)}"


class TurnParser:
    """Parses one assistant turn from ids (or, for engines without ids, from text).

    Feed output in any pieces; the assembled result does not depend on where they were cut. `done` turns True
    when generation should stop: the turn ended, or a control token appeared that no K3 turn contains.
    With `calls_allowed` False (no tools declared, or `tool_choice` "none") a tools section is dropped.
    """

    def __init__(
        self,
        tokenizer: K3Tokenizer | None,
        *,
        start: Channel,
        new_call_id: Callable[[], str] = new_call_id,
        calls_allowed: bool = True,
    ) -> None:
        self._new_call_id = new_call_id
        self._calls_allowed = calls_allowed
        self._state = State(start)
        tags = TagReader(self)
        self._tags = tags
        self._tokens = TokenLexer(tokenizer, tags.on_text, self._on_marker) if tokenizer else None
        self._texts = TextLexer(tags.on_text, self._on_marker)
        self._furthest = ORDER.index(self._state)
        self._breakable = False  # content was reported and no break since
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ParsedCall] = []
        self._call: CallStream | None = None
        self._tools_seen = False
        self._junk_in_tools = False
        self._finished = False
        self._warnings: dict[str, None] = {}

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Events of further output ids. Raises ValueError on an id outside the vocabulary."""
        if self._tokens is None:
            raise ValueError("this parser was built without a tokenizer; use feed_text or give one")
        self._tokens.feed(ids)
        return self._take_events()

    def feed_text(self, text: str) -> list[Event]:
        """Events of further output text, in which marker spellings are taken as markers."""
        self._texts.feed(text)
        return self._take_events()

    def finish(self, reason: Literal["stop", "length", "abort"]) -> list[Event]:
        """Events of what was held back; "stop" vouches that `<|end_of_msg|>` was generated, fed or not."""
        if self._tokens is not None:
            self._tokens.finish()
        self._texts.finish()
        if reason == "stop" and not self.done:
            self._tags.on_marker(Marker.END)
        self._tags.drop()
        self._end_call(closed=False)
        return self._take_events()

    @property
    def done(self) -> bool:
        """Whether nothing that follows can belong to the turn."""
        return self._state is State.END

    @property
    def turn(self) -> ParsedTurn:
        """The turn so far; after `finish` the whole turn."""
        return ParsedTurn(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            calls=tuple(self._calls),
            finished=self._finished,
            warnings=tuple(self._warnings),
        )

    def _on_marker(self, marker: Marker) -> None:
        if self._breakable:
            self._breakable = False
            self._events.append(ContentBreak())
        self._tags.on_marker(marker)

    # What the tag reader reports -----------------------------------------------------------------

    @property
    def open_element(self) -> str:
        """Name of the innermost open element, "" outside of all."""
        name = self._state.value
        return "" if name.startswith(" ") else name

    def on_data(self, text: str) -> None:
        """Text of the innermost open element."""
        match self._state:
            case State.THINK:
                self._reasoning.append(text)
                self._events.append(ReasoningDelta(text))
            case State.RESPONSE:
                self._content.append(text)
                self._events.append(ContentDelta(text))
                self._breakable = True
            case State.ARGUMENT | State.JSON if self._call is not None:
                self._call.value(text)
            case State.BETWEEN if answer := text.lstrip():
                self.warn("answer_without_channel")
                self._furthest = max(self._furthest, ORDER.index(State.RESPONSE))
                self._state = State.RESPONSE
                self.on_data(answer)
            case State.CLOSED | State.END:
                self.warn("output_after_end")
            case State.AFTER | State.TOOLS | State.CALL if not text.isspace():
                self.warn("text_outside_channels")
            case _:  # what is dropped, and white space between elements
                pass

    def on_open(self, name: str, attributes: dict[str, str]) -> None:
        """A known element begins: accepted where it may stand, otherwise dropped with its content."""
        state = self._state
        if state in (State.CLOSED, State.END):
            self.warn("output_after_end")
        elif name in ("think", "response"):
            self._open_channel(State(name))
        elif name == "tools":
            self._open_tools()
        elif name == "call" and (state is State.TOOLS or state in IN_CALL or self._is_junk_in_tools):
            self._end_call(closed=False)
            self._open_call(attributes.get("tool", ""))
        elif name in ("argument", "json") and self._call is not None:
            self._open_value(self._call, name, attributes)
        elif state is not State.JUNK:
            self._drop_element("malformed_tag")

    def on_close(self, name: str) -> None:
        """A known element ends: the innermost, or one around it with what it still holds."""
        state = self._state
        if state in (State.CLOSED, State.END):
            self.warn("output_after_end")
        elif name == "message":
            self._end_call(closed=False)
            self._state = State.CLOSED
        elif name == state.value:
            self._close_innermost(state)
        elif name == "call" and (self._call is not None or self._is_junk_in_tools):
            self._close_call_early()
        elif name == "tools" and (self._call is not None or state is State.JUNK):
            self._end_call(closed=False)
            self._state = State.AFTER
        elif name == "response" and state is State.THINK:
            self.warn("response_closed_in_think")
            self._state = State.AFTER
        elif state is not State.JUNK:
            self.warn("stray_marker")

    def on_bad_tag(self, *, is_element: bool) -> None:
        """A tag that cannot be read; its text is dropped, and a whole one's content too."""
        if self._state in (State.CLOSED, State.END):
            self.warn("output_after_end")
        elif self._state is State.JUNK:
            return
        elif is_element:
            self._drop_element("malformed_tag")
        else:
            self.warn("malformed_tag")
            if self._call is not None:
                self._call.cut_value()

    def on_end(self, marker: Marker) -> None:
        """The turn is over: by its end marker, or by a control token that ends nothing."""
        if self.done:
            self.warn("output_after_end")
            return
        if marker is Marker.OTHER:
            self.warn("control_token")
        self._end_call(closed=False)
        self._finished = marker is Marker.END
        self._state = State.END

    def warn(self, code: str) -> None:
        """Note an irregularity, once."""
        self._warnings.setdefault(code)

    # Elements ------------------------------------------------------------------------------------

    @property
    def _is_junk_in_tools(self) -> bool:
        return self._state is State.JUNK and self._junk_in_tools

    def _open_channel(self, wanted: State) -> None:
        if self._state is wanted:
            self.warn("repeated_open")
            return
        if self._state is State.THINK:
            self.warn("think_not_closed")
        if ORDER.index(wanted) > self._furthest:
            self._furthest = ORDER.index(wanted)
        else:
            self.warn("channel_out_of_order")
        self._end_call(closed=False)
        self._state = wanted

    def _open_tools(self) -> None:
        if self._state is State.THINK:
            self.warn("think_not_closed")
        if not self._calls_allowed:
            self._drop_element("calls_not_allowed")
        elif self._tools_seen:
            self._drop_element("second_tools_section")
        else:
            self._tools_seen = True
            self._furthest = ORDER.index(State.TOOLS)
            self._state = State.TOOLS

    def _open_call(self, name: str) -> None:
        self._state = State.TOOLS
        if not name:
            self._drop_element("call_without_name")
            return
        self._call = CallStream(len(self._calls), self._new_call_id(), name, self._events)
        self._calls.append(self._call.unfinished())
        self._state = State.CALL

    def _open_value(self, call: CallStream, name: str, attributes: dict[str, str]) -> None:
        if name == "json":
            call.begin_opaque()
            self._state = State.JSON
        elif "key" in attributes:
            if not call.begin(attributes["key"], attributes.get("type", "string")):
                self.warn("duplicate_argument")
            self._state = State.ARGUMENT
        else:
            call.cut_value()
            self.warn("malformed_tag")
            self._state = State.CALL

    def _close_innermost(self, state: State) -> None:
        if state is State.THINK:
            self._state = State.BETWEEN
        elif state is State.CALL:
            self._end_call(closed=True)
            self._state = State.TOOLS
        elif state in IN_CALL:
            if self._call is not None and not self._call.end_value():
                self.warn("argument_not_json")
            self._state = State.CALL
        else:
            self._state = State.AFTER

    def _close_call_early(self) -> None:
        """A call ends inside one of its values or inside something dropped."""
        if self._call is not None:
            self._call.cut_value()
        self._end_call(closed=True)
        self._state = State.TOOLS

    def _end_call(self, *, closed: bool) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        if not closed:
            self.warn("call_not_closed")
        elif call.broken:
            self.warn("call_malformed")
        self._calls[call.index] = call.finish(complete=closed)

    def _drop_element(self, warning: str) -> None:
        """Ignore an element and all it holds; a call around it must not be executed."""
        self.warn(warning)
        in_tools = warning in ("malformed_tag", "call_without_name")
        self._junk_in_tools = in_tools and self._state in (State.TOOLS, *IN_CALL)
        self._end_call(closed=False)
        self._state = State.JUNK

    def _take_events(self) -> list[Event]:
        events = merge_deltas(self._events)
        self._events.clear()
        return events
