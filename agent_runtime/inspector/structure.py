"""Token ids as K3's structure: messages as blocks, in them control tokens, tags and the text of each channel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Channel

Kind: TypeAlias = Literal["control", "tag", "text"]


class Piece(NamedTuple):
    """A run of tokens of one kind. ``channel`` is the innermost open tag: message, think, response, argument, ..."""

    kind: Kind
    channel: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Block:
    """One message of a prompt or of an output, from token ``start`` to before ``end``.

    ``tag`` is its opening tag as it stands there, "" for what stands in no message; ``start_tags`` are the tags that
    are open where it begins.
    """

    tag: str
    start: int
    end: int
    start_tags: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.end - self.start

    @property
    def role(self) -> str:
        """The role in its tag, "" without one."""
        _, found, rest = self.tag.partition('role="')
        return rest.partition('"')[0] if found else ""


def blocks(ids: Sequence[int], tokenizer: K3Tokenizer, start: Channel | None = None) -> list[Block]:
    """The messages in ``ids``, without gaps. ``start`` for an output: the channel its prompt has left open.

    Only the tags of messages are decoded, so that a million tokens take a fraction of a second.
    """
    special = tokenizer.special
    opens = _places(ids, special.open)
    found: list[Block] = []
    begin, tag = 0, ""
    tags: tuple[str, ...] = ()
    if start is not None:
        tag, tags = 'message role="assistant"', ("message", start)
    for place in opens:
        name = _tag_at(ids, place, tokenizer)
        if name.split(" ", 1)[0] != "message":
            continue
        if place > begin:
            found.append(Block(tag, begin, place, tags))
        begin, tag, tags = place, name, ()
    if begin < len(ids):
        found.append(Block(tag, begin, len(ids), tags))
    return found


def pieces(ids: Sequence[int], block: Block, tokenizer: K3Tokenizer) -> list[Piece]:
    """A block piece by piece: every token is in one of them."""
    special = tokenizer.special
    is_special = tokenizer.is_special
    found: list[Piece] = []
    stack = list(block.start_tags)
    tag_of: Literal["open", "close"] | None = None
    at = block.start
    while at < block.end:
        token = ids[at]
        if is_special(token):
            found.append(Piece("control", _top(stack), tokenizer.spelling(token), 1))
            tag_of = "open" if token == special.open else "close" if token == special.close else None
            at += 1
            continue
        end = at + 1
        while end < block.end and not is_special(ids[end]):
            end += 1
        text = tokenizer.decode(ids[at:end])
        if tag_of is None:
            found.append(Piece("text", _top(stack), text, end - at))
        else:
            name = text.split(" ", 1)[0]
            if tag_of == "open":
                stack.append(name)
            found.append(Piece("tag", name, text, end - at))
            if tag_of == "close" and stack:
                stack.pop()
        at = end
    return found


def call_tokens(ids: Sequence[int], tokenizer: K3Tokenizer) -> int:
    """Tokens of an output from the opening of its calls on, to their end or that of the output."""
    special = tokenizer.special
    opened = (place for place in _places(ids, special.open) if _tag_at(ids, place, tokenizer) == "tools")
    begin = next(opened, None)
    if begin is None:
        return 0
    for place in _places(ids, special.close):
        if place > begin and _tag_at(ids, place, tokenizer) == "tools":
            return _behind_tag(ids, place, tokenizer) - begin
    return len(ids) - begin


def _behind_tag(ids: Sequence[int], place: int, tokenizer: K3Tokenizer) -> int:
    """Where a tag is over: behind its separator, if that is there."""
    end = place + 1
    while end < len(ids) and not tokenizer.is_special(ids[end]):
        end += 1
    return end + 1 if end < len(ids) and ids[end] == tokenizer.special.sep else end


def _top(stack: Sequence[str]) -> str:
    return stack[-1] if stack else ""


def _places(ids: Sequence[int], token: int) -> list[int]:
    return [place for place, found in enumerate(ids) if found == token]


def _tag_at(ids: Sequence[int], place: int, tokenizer: K3Tokenizer) -> str:
    """The text between an opening or closing token and the control token behind it."""
    end = place + 1
    while end < len(ids) and not tokenizer.is_special(ids[end]):
        end += 1
    return tokenizer.decode(ids[place + 1 : end])
