"""A vocabulary that needs no file: one token per byte, then K3's control tokens."""

from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import Segment

SPECIALS = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[UNK]",
    "[PAD]",
)


def byte_tokenizer() -> K3Tokenizer:
    """256 byte tokens and 12 control tokens."""
    ranks = {bytes((value,)): value for value in range(256)}
    specials = {256 + index: text for index, text in enumerate(SPECIALS)}
    return K3Tokenizer(ranks, specials, 256 + len(SPECIALS))


class TurnWriter:
    """Writes the ids a well-behaved K3 would generate for an assistant turn."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer

    def turn(
        self,
        reasoning: str | None = "",
        content: str = "",
        calls: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (),
        *,
        end: bool = True,
    ) -> list[int]:
        """Ids after the generation prompt; ``reasoning`` None is a turn that begins in the response.

        A call is (tool, arguments), an argument (key, type, value as K3 writes it).
        """
        pieces: list[Segment] = []
        if reasoning is not None:
            pieces += [Segment(reasoning), *_close("think"), *_open("response")]
        pieces += [Segment(content), *_close("response")]
        if calls:
            pieces += _open("tools")
            for index, (tool, arguments) in enumerate(calls):
                pieces += self._call(tool, index + 1, arguments)
            pieces += _close("tools")
        if end:
            pieces += [*_close("message"), _special("<|end_of_msg|>")]
        return self._tokenizer.encode_segments(pieces)

    def text(self, text: str) -> list[int]:
        """Ids of plain text."""
        return self._tokenizer.encode_text(text)

    def _call(self, tool: str, index: int, arguments: tuple[tuple[str, str, str], ...]) -> list[Segment]:
        pieces = _open(f'call tool="{tool}" index="{index}"')
        for key, kind, value in arguments:
            pieces += [*_open(f'argument key="{key}" type="{kind}"'), Segment(value), *_close("argument")]
        return [*pieces, *_close("call")]


def _special(text: str) -> Segment:
    return Segment(text, True)


def _open(tag: str) -> list[Segment]:
    return [_special("<|open|>"), Segment(tag), _special("<|sep|>")]


def _close(tag: str) -> list[Segment]:
    return [_special("<|close|>"), Segment(tag), _special("<|sep|>")]
