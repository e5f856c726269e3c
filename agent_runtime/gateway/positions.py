"""Where in a prompt other requests may go on: end of the head, marks of the client, end of the history. In tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from agent_runtime.engine.types import EngineImage
from agent_runtime.guard.prompt import ReplayedPrompt
from k3_sglang.chat.encode import EncodedPart, tokens_behind
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message

MAX_MARKS = 16
"""Marks that count; of more the deepest do, which have the others before them. A client that marks every message
would else have every one of them kept."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position that the client marked, and for how long it is to be kept."""

    position: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions in one prompt, in tokens from its start."""

    head_len: int
    """End of the tools, the effort and the system messages before any other: what sessions share."""
    history_len: int
    """End of the last message. Behind it come instructions for this turn only, and the opening of the answer."""
    one_shot: bool
    """Such instructions are there: the next prompt does not contain them."""
    marks: tuple[Mark, ...] = ()
    """Ascending."""

    def expanded(self, ids: Sequence[int], images: Sequence[EngineImage], pad: int) -> "Positions":
        """The same positions as the engine counts, each image's one id replaced by its tokens."""
        if not images:
            return self
        pads = [index for index, token in enumerate(ids) if token == pad]
        added = list(accumulate((image.tokens - 1 for image in images), initial=0))

        def moved(position: int) -> int:
            return position + added[sum(1 for index in pads if index < position)]

        marks = tuple(Mark(moved(mark.position), mark.ttl_s) for mark in self.marks)
        return replace(self, head_len=moved(self.head_len), history_len=moved(self.history_len), marks=marks)


def positions_of(replayed: ReplayedPrompt, tokenizer: K3Tokenizer) -> Positions:
    """Positions of an encoded request, as the engine counts tokens, images expanded.

    Behind the last message come the instructions for one turn, then the opening of the answer.
    """
    parts = replayed.parts
    behind = next((number for number, part in enumerate(reversed(parts)) if part.message is not None), len(parts))
    history = parts[: len(parts) - behind]
    history_len = sum(len(part.ids) for part in history)
    marks = tuple(marks_in(replayed.request, history, tokenizer))[-MAX_MARKS:]
    found = Positions(head_tokens(replayed.request, history), history_len, behind > 1, marks)
    return found.expanded(replayed.prompt.ids, replayed.images, tokenizer.special.media_pad)


def head_tokens(part: ChatRequest, encoded: Sequence[EncodedPart]) -> int:
    """Length of what precedes the first message that is not the system's."""
    length = 0
    for piece in encoded:
        if piece.message is not None and part.messages[piece.message].role != "system":
            break
        length += len(piece.ids)
    return length


def marks_in(part: ChatRequest, encoded: Sequence[EncodedPart], tokenizer: K3Tokenizer) -> Iterator[Mark]:
    """Marks of some messages and of the tools before them, ascending; positions count from the start of the part.

    The mark of a content part lies at its last token. That of the last part is the message's own: nothing can come
    between them. So is any mark inside an assistant message, whose ids may be the recorded ones.
    """
    end = 0
    tools_ttl_s = part.tools_cache_ttl_s if part.tools else None
    for place, piece in enumerate(encoded):
        end += len(piece.ids)
        if piece.message is None:
            if place == 0 and tools_ttl_s is not None:
                yield Mark(end, tools_ttl_s)
            continue
        message = part.messages[piece.message]
        inner, own_ttl_s = _split(message)
        for position, ttl_s in inner:
            yield Mark(end - tokens_behind(message, position, tokenizer), ttl_s)
        if own_ttl_s is not None:
            yield Mark(end, own_ttl_s)


def _split(message: Message) -> tuple[list[tuple[int, int]], int | None]:
    """Marks (place among the content's parts, seconds) inside a message, and seconds of the mark at its end."""
    content = message.content
    if not isinstance(content, tuple):
        return [], message.cache_ttl_s
    marked = [(place, part.cache_ttl_s) for place, part in enumerate(content) if part.cache_ttl_s is not None]
    inside = [mark for mark in marked if mark[0] < len(content) - 1 and message.role != "assistant"]
    at_end = [ttl_s for place, ttl_s in marked if (place, ttl_s) not in inside]
    if message.cache_ttl_s is not None:
        at_end.append(message.cache_ttl_s)
    return inside, max(at_end, default=None)
