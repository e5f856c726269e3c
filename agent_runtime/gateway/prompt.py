"""A chat request to prompt ids, with recorded turns spliced in as the ids they were."""

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from agent_runtime.ledger.recorded import ContextDigest, RecordedTurns
from k3_sglang.chat.encode import Prompt, encode_ids, render
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel, ChatRequest, Message


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
    """Prompt ids, the hash of the conversation they continue, and where its turns came from."""

    prompt: Prompt
    context: bytes
    replay: Replay


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
    context = ContextDigest()
    head, turns = _split(request.messages)
    bare = replace(request, tool_choice=None, response_format=None, add_generation_prompt=False)
    history = replace(bare, tools=(), effort=None)

    def append(piece_ids: list[int]) -> None:
        context.extend(piece_ids)
        ids.extend(piece_ids)

    append(encode_ids(replace(bare, messages=head), tokenizer, cache))
    exact = 0
    for turn, following in zip_longest(turns, turns[1:]):
        spellings = recorded.find(context.digest(), request.start, turn[0])
        if not spellings:
            append(encode_ids(replace(history, messages=turn), tokenizer, cache))
            continue
        exact += 1
        pieces = (_replayed(turn, known, history, tokenizer, cache) for known in spellings)
        append(_continued(list(pieces), context, following, request.start, recorded))
    end = replace(request, messages=(), tools=(), effort=None)
    ids.extend(encode_ids(end, tokenizer, cache))
    return ReplayedPrompt(Prompt(tuple(ids), request.start), context.digest(), Replay(exact, len(turns) - exact))


def _replayed(
    turn: tuple[Message, ...],
    known: tuple[int, ...],
    history: ChatRequest,
    tokenizer: K3Tokenizer,
    cache: EncodeCache | None,
) -> list[int]:
    """Ids of a turn and of what answers it, the assistant's own as they were generated."""
    spoken = replace(turn[0], recorded_ids=known, recorded_start=history.start)
    return encode_ids(replace(history, messages=(spoken, *turn[1:])), tokenizer, cache)


def _continued(
    pieces: list[list[int]],
    context: ContextDigest,
    following: tuple[Message, ...] | None,
    start: Channel,
    recorded: RecordedTurns,
) -> list[int]:
    """Of several ways to have said a turn, the one from which the following turn went on; else the newest."""
    if len(pieces) > 1 and following is not None:
        for piece_ids in pieces:
            there = context.copy()
            there.extend(piece_ids)
            if recorded.find(there.digest(), start, following[0]):
                return piece_ids
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
