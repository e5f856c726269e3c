"""A completion whatever the protocol: its facts, what happens while it runs, and what a protocol must say of that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from starlette.responses import Response

from agent_runtime.gateway.choice import Delivered
from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.positions import Mark
from agent_runtime.guard.verdict import Replay
from k3_sglang.chat.events import Event
from k3_sglang.chat.types import Channel

WireForm: TypeAlias = Literal["chat", "messages", "responses", "completions"]
"""The form of a request's body, as its record names it."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice; ``cached_tokens`` are the prompt tokens the engine did not compute again.

    ``cache`` is what the engine's cache says about them: why there were not more.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cache: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a completion before it runs.

    ``token`` is random text that a protocol's ids are made from. ``start`` is the channel its prompt leaves open.
    ``loosened`` names what the request's schemas demand and its grammar could not hold the model to; ``session`` is
    how the cache's control routes name the session, ``hinted`` whether the engine's cache was told anything, ``marks``
    the client's marks in the prompt, ascending, if it was. ``signatures`` has one entry for each choice: opaque text
    that leads back to the turn when it stands in a history.
    """

    token: str
    created: int
    model: str
    start: Channel
    prompt_tokens: int
    replay: Replay
    loosened: tuple[str, ...]
    session: str | None
    hinted: bool
    marks: tuple[Mark, ...]
    signatures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Began:
    """Choice ``index`` runs: comes once, before all else of it. ``cached_tokens`` as in `Usage`."""

    index: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class NewDelta:
    """More of choice ``index``: reasoning, content, a call's start, arguments or end; never a ContentBreak.

    Of a call that is cut or malformed the end says so (``complete`` False), and the arguments before it never add up
    to whole JSON.
    """

    index: int
    event: Event


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Choice ``index`` is over."""

    index: int
    delivered: Delivered
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failure:
    """The completion failed; nothing more comes from the choice that did."""

    error: ApiError


Progress: TypeAlias = Began | NewDelta | ChoiceEnd
Item: TypeAlias = Progress | Failure


class Wire(Protocol):
    """One protocol's words for one completion. Holds its state; used for one answer, from one task."""

    protocol: WireForm
    keep_alive: bytes
    """What is sent on a silent stream."""

    @property
    def id(self) -> str:
        """The completion's id in this protocol."""
        ...

    def headers(self) -> Mapping[str, str]:
        """Response headers beside those of every completion."""
        ...

    def events(self, item: Progress) -> bytes:
        """Events of a stream for what has happened; empty where the protocol says nothing."""
        ...

    def last_events(self, ends: Sequence[ChoiceEnd]) -> bytes:
        """The end of a stream, after the events of all choices."""
        ...

    def failure_events(self, error: ApiError) -> bytes:
        """The end of a stream that fails after it has begun."""
        ...

    def whole(self, ends: Sequence[ChoiceEnd]) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def refusal(self, error: ApiError) -> Response:
        """The answer when the completion fails before anything was sent."""
        ...
