"""A chat request to prompt ids, with recorded turns spliced in as the ids they were."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from agent_runtime.engine.types import EngineImage, expanded_len
from agent_runtime.gateway.positions import MAX_MARKS, Mark, Positions, head_tokens, marks_in
from agent_runtime.ledger.recorded import ContextDigest, RecordedTurns
from k3_sglang.chat.encode import EncodedPart, Prompt, encode_parts, render
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel, ChatRequest, ImagePart, Message


@dataclass(frozen=True, slots=True)
class Replay:
    """How many assistant turns of a history came from the record, and how many from their text."""

    exact: int
    rendered: int

    @property
    def verdict(self) -> Literal["exact", "rendered", "new"]:
        """``new``: no assistant turn yet. ``rendered``: at least one turn was rebuilt from its text."""
        if self.rendered:
            return "rendered"
        return "exact" if self.exact else "new"

    def header(self) -> str:
        """Value of ``x-k3-replay``."""
        return f"{self.verdict}; exact={self.exact}; rendered={self.rendered}"


@dataclass(frozen=True, slots=True)
class ReplayedPrompt:
    """Prompt ids, the images at their pads, the hash of the conversation they continue, where its turns came from,
    and the positions that later requests may share."""

    prompt: Prompt
    images: tuple[EngineImage, ...]
    context: bytes
    replay: Replay
    positions: Positions
    """As the engine counts tokens, images expanded."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the engine counts them, images expanded."""
        return expanded_len(self.prompt.ids, self.images)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of messages as ids, with the images at its pads in order and the marks of the client."""

    ids: list[int]
    images: tuple[ImagePart, ...]
    marks: tuple[Mark, ...] = ()
    head_len: int = 0

    def add_to(self, context: ContextDigest) -> None:
        context.extend(self.ids, [image.digest for image in self.images])


def build_prompt(
    request: ChatRequest, tokenizer: K3Tokenizer, recorded: RecordedTurns, cache: EncodeCache | None = None
) -> ReplayedPrompt:
    """Encode a request, replacing each assistant turn that the record knows at this place by its ids.

    Equals ``encode`` of the request with those turns' ``recorded_ids`` set, in one pass over the history.
    Raises ChatRequestError as ``encode`` does.
    """
    try:
        return _walk(request, tokenizer, recorded, cache)
    except ChatRequestError:
        # The walk renders pieces of the history, so only the whole names the message's true index.
        render(request)
        raise


def _walk(
    request: ChatRequest, tokenizer: K3Tokenizer, recorded: RecordedTurns, cache: EncodeCache | None
) -> ReplayedPrompt:
    ids: list[int] = []
    images: list[ImagePart] = []
    marks: list[Mark] = []
    context = ContextDigest()
    head, turns = _split(request.messages)
    bare = replace(request, tool_choice=None, response_format=None, add_generation_prompt=False)
    history = replace(bare, tools=(), effort=None)

    def append(piece: _Piece) -> None:
        piece.add_to(context)
        marks.extend(Mark(len(ids) + mark.position, mark.ttl_s) for mark in piece.marks)
        ids.extend(piece.ids)
        images.extend(piece.images)

    beginning = _piece(replace(bare, messages=head), tokenizer, cache)
    append(beginning)
    exact = 0
    for turn, following in zip_longest(turns, turns[1:]):
        spellings = recorded.find(context.digest(), request.start, turn[0])
        if not spellings:
            append(_piece(replace(history, messages=turn), tokenizer, cache))
            continue
        exact += 1
        pieces = (_replayed(turn, known, history, tokenizer, cache) for known in spellings)
        append(_continued(list(pieces), context, following, request.start, recorded))
    end = encode_parts(replace(request, messages=(), tools=(), effort=None), tokenizer, cache)
    positions = Positions(beginning.head_len, len(ids), len(end) > 1, tuple(marks[-MAX_MARKS:]))
    ids.extend(_joined(end))
    sent = tuple(EngineImage(image.source, image.tokens) for image in images)
    return ReplayedPrompt(
        Prompt(tuple(ids), request.start),
        sent,
        context.digest(),
        Replay(exact, len(turns) - exact),
        positions.expanded(ids, sent, tokenizer.special.media_pad),
    )


def _piece(part: ChatRequest, tokenizer: K3Tokenizer, cache: EncodeCache | None) -> _Piece:
    """Ids of some messages, and their images in the order of the pads (results are put in the order of the calls)."""
    images: tuple[ImagePart, ...] = ()
    if any(isinstance(piece, ImagePart) for message in part.messages for piece in message.content or ()):
        images = tuple(segment.image for segment in render(part) if segment.image is not None)
    parts = encode_parts(part, tokenizer, cache)
    return _Piece(_joined(parts), images, tuple(marks_in(part, parts, tokenizer)), head_tokens(part, parts))


def _joined(parts: Sequence[EncodedPart]) -> list[int]:
    ids: list[int] = []
    for part in parts:
        ids += part.ids
    return ids


def _replayed(
    turn: tuple[Message, ...],
    known: tuple[int, ...],
    history: ChatRequest,
    tokenizer: K3Tokenizer,
    cache: EncodeCache | None,
) -> _Piece:
    """A turn and what answers it, the assistant's own ids as they were generated."""
    spoken = replace(turn[0], recorded_ids=known, recorded_start=history.start)
    return _piece(replace(history, messages=(spoken, *turn[1:])), tokenizer, cache)


def _continued(
    pieces: list[_Piece],
    context: ContextDigest,
    following: tuple[Message, ...] | None,
    start: Channel,
    recorded: RecordedTurns,
) -> _Piece:
    """Of several ways to have said a turn, the one from which the following turn went on; else the newest."""
    if len(pieces) > 1 and following is not None:
        for piece in pieces:
            there = context.copy()
            piece.add_to(there)
            if recorded.find(there.digest(), start, following[0]):
                return piece
    return pieces[0]


def _split(
    messages: tuple[Message, ...],
) -> tuple[tuple[Message, ...], list[tuple[Message, ...]]]:
    """What precedes the first assistant message, then each assistant message with all that answers it.

    A piece can be rendered alone: only tool results look back, and only to their own assistant message.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "assistant"]
    bounds = [*starts, len(messages)]
    pieces = [messages[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    return messages[: bounds[0]], pieces
