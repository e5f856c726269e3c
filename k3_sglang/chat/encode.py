"""Conversations to K3 prompts: segments, then token ids."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from k3_sglang.chat.arguments import argument_text, load_arguments, type_name
from k3_sglang.chat.canonical import canonical_json
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.toolresults import NamedResult, name_results
from k3_sglang.chat.types import Channel, ChatRequest, Content, ImagePart, Message, Segment, ToolCall

_OPEN = Segment("<|open|>", True)
_CLOSE = Segment("<|close|>", True)
_SEP = Segment("<|sep|>", True)
_END = Segment("<|end_of_msg|>", True)

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel),"
    " supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code"
    " blocks (```json) or any additional formatting."
)
_RESPONSE_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt and the channel that its generation prompt leaves open."""

    ids: tuple[int, ...]
    start: Channel


def encode(request: ChatRequest, tokenizer: K3Tokenizer, cache: EncodeCache | None = None) -> Prompt:
    """Token ids of a request's prompt; the request is not changed, and `cache` changes nothing but the time.

    Raises ChatRequestError as `render` does, and when recorded ids lack their `<|end_of_msg|>`.
    """
    end = tokenizer.special.end_of_msg
    for index, message in enumerate(request.messages):
        recorded = message.recorded_ids
        if recorded is not None and (not recorded or recorded[-1] != end):
            raise ChatRequestError(
                f"messages[{index}].recorded_ids",
                "recorded_ids_not_finished",
                f"recorded ids end with {recorded[-1:]}, not with <|end_of_msg|> ({end}); "
                "give finished turns only and let unfinished ones be rendered from their text",
            )
    return Prompt(tuple(encode_ids(request, tokenizer, cache)), request.start)


def encode_ids(request: ChatRequest, tokenizer: K3Tokenizer, cache: EncodeCache | None = None) -> list[int]:
    """Ids of `render(request)`; raises as that does."""
    ids: list[int] = []
    for part in encode_parts(request, tokenizer, cache):
        ids += part.ids
    return ids


class EncodedPart(NamedTuple):
    """Ids of one part of a prompt. `message` is its index in the request, None for what is no message."""

    message: int | None
    ids: Sequence[int]


_new_part: Callable[[tuple[int | None, Sequence[int] | None]], EncodedPart] = partial(
    tuple.__new__,  # pyright: ignore[reportUnknownMemberType]
    EncodedPart,
)


def encode_parts(request: ChatRequest, tokenizer: K3Tokenizer, cache: EncodeCache | None = None) -> list[EncodedPart]:
    """Ids of `render(request)` part by part, in the order of the prompt; raises as that does."""
    if cache is None:
        return [EncodedPart(index, tokenizer.encode_segments(made) + [*ids]) for index, _, made, ids in _parts(request)]
    try:
        parts = list(_parts(request))
        found: list[Sequence[int] | None] = [*cache.find([part[1] for part in parts])]
        for place, (_, key, segments, recorded) in enumerate(parts):
            ids = found[place]
            if ids is None:
                ids = tokenizer.encode_segments(segments)
                found[place] = ids = ids if key is None else cache.keep(key, ids)
            if recorded:
                found[place] = tuple(ids) + recorded
        # A history has thousands: made without a call of Python code for each.
        return list(map(_new_part, zip([part[0] for part in parts], found, strict=True)))
    except ChatRequestError:
        render(request)  # meets the errors in their order
        raise


def tokens_behind(message: Message, position: int, tokenizer: K3Tokenizer) -> int:
    """Tokens of a message behind one part of its content: the parts that follow, and the message's end.

    Of messages other than the assistant's; every part is tokenised on its own.
    """
    content = message.content
    if message.role == "assistant" or not isinstance(content, tuple):
        raise ValueError(f"a {message.role} message with content {type(content).__name__} has no such part")
    return len(tokenizer.encode_segments((*_content("content", content[position + 1 :]), *_end_message())))


def render(request: ChatRequest) -> list[Segment]:
    """Segments of a request's prompt, in order.

    Raises ChatRequestError for arguments that are not a JSON object, tool results no tool can be named for,
    and images of unknown size.
    """
    segments: list[Segment] = []
    for _, _, made, recorded in _parts(request):
        segments += made
        if recorded:
            segments.append(Segment("", False, recorded))
    return segments


# A part of a prompt: the index of its message, if it is one; a key that determines the ids of its segments, None if it
# is short; its segments; and the recorded ids that follow them.
_Part = tuple[int | None, Hashable | None, Iterable[Segment], tuple[int, ...]]


def _parts(request: ChatRequest) -> Iterator[_Part]:
    if request.tools:
        yield _system("tool-declare", _TOOLS.format(canonical_json(list(request.tools))))
    thinking = request.thinking
    if thinking and request.effort is not None:
        yield _system("thinking-effort", _EFFORT.format(request.effort))
    for index, message, result in name_results(request.messages):
        if message.role == "assistant":
            recorded = message.recorded_ids
            if recorded is not None and (thinking or message.recorded_start == "response"):
                key = "turn", message.name, message.recorded_start
                yield index, key, _recorded_head(message), recorded
            else:
                yield index, _turn_key(message, thinking), _assistant(index, message, thinking), ()
        elif message.role == "system" and message.tools:
            yield _system("tool-declare", _NEW_TOOLS.format(canonical_json(list(message.tools))), index)
        else:
            key = message.role, message.name, _content_key(message.content), result
            yield index, key, _message(index, message, result), ()
    yield from _one_shot(request)
    if request.add_generation_prompt:
        yield None, None, (*_open("message", role="assistant"), *_open(request.start)), ()


def _turn_key(turn: Message, thinking: bool) -> Hashable:
    """All that the segments of an assistant turn depend on when it is rendered from its text.

    Strings and tuples only: keys of long histories are hashed with every request.
    """
    calls = tuple([(call.name, call.arguments) for call in turn.tool_calls])
    return thinking, turn.name, _content_key(turn.content), turn.reasoning, calls


def _content_key(content: Content) -> Hashable:
    if isinstance(content, tuple):
        return tuple(part.size if isinstance(part, ImagePart) else part.text for part in content)
    return content


def _one_shot(request: ChatRequest) -> Iterator[_Part]:
    """Instructions for the next turn only; they come after the history, which stays cacheable."""
    if isinstance(request.tool_choice, str) and request.tool_choice in _TOOL_CHOICE:
        yield _system("tool-choice", _TOOL_CHOICE[request.tool_choice])
    wanted = request.response_format
    if wanted is not None:
        text = _RESPONSE_FORMAT.format(wanted.kind)
        if wanted.kind == "json_schema":
            text += _RESPONSE_SCHEMA.format(canonical_json(wanted.schema))
        yield _system("response-format", text)


def _message(index: int, message: Message, result: NamedResult | None) -> Iterator[Segment]:
    if result is not None:
        yield from _open("message", role="tool", tool=result.tool, index=str(result.position))
    elif message.name is not None:
        yield from _open("message", role=message.role, name=message.name)
    else:
        yield from _open("message", role=message.role)
    yield from _content(f"messages[{index}]", message.content)
    yield from _end_message()


def _open_turn(message: Message) -> tuple[Segment, ...]:
    if message.name is not None:
        return _open("message", role="assistant", name=message.name)
    return _open("message", role="assistant")


def _recorded_head(message: Message) -> Iterator[Segment]:
    """What stands before the recorded ids of a turn."""
    yield from _open_turn(message)
    yield from _open(message.recorded_start)


def _assistant(index: int, message: Message, thinking: bool) -> Iterator[Segment]:
    param = f"messages[{index}]"
    yield from _open_turn(message)
    if thinking:
        yield from _open("think")
        if message.reasoning and not message.reasoning.isspace():
            yield Segment(message.reasoning)
        yield from _close("think")
    yield from _open("response")
    yield from _content(param, message.content)
    yield from _close("response")
    if message.tool_calls:
        yield from _open("tools")
        for position, call in enumerate(message.tool_calls):
            yield from _call(f"{param}.tool_calls[{position}]", call, position + 1)
        yield from _close("tools")
    yield from _end_message()


def _call(param: str, call: ToolCall, index: int) -> Iterator[Segment]:
    yield from _open("call", tool=call.name, index=str(index))
    try:
        short = len(call.arguments) <= _SHORT_ARGUMENTS
        yield from _short_arguments(call.arguments) if short else _arguments(call.arguments)
    except ChatRequestError as error:
        raise ChatRequestError(f"{param}.function.arguments", error.code, error.message) from None
    yield from _close("call")


# What is rendered is remembered only up to this many characters, to bound the memory: segments take up to a hundred
# times the space of their text.
_SHORT_ARGUMENTS = 512
_SHORT_ATTRIBUTES = 256


def _arguments(arguments: str) -> list[Segment]:
    values = load_arguments(arguments)
    if values is None:
        return [*_open("json", type="object"), Segment(arguments), *_close("json")]
    segments: list[Segment] = []
    for key, value in values.items():
        segments += _open("argument", key=key, type=type_name(value))
        if text := argument_text(value):
            segments.append(Segment(text))
        segments += _close("argument")
    return segments


@lru_cache(maxsize=2048)
def _short_arguments(arguments: str) -> tuple[Segment, ...]:
    return tuple(_arguments(arguments))


def _content(param: str, content: Content) -> Iterator[Segment]:
    if content is None:
        return
    if isinstance(content, str):
        if content:
            yield Segment(content)
        return
    for position, part in enumerate(content):
        if isinstance(part, ImagePart):
            yield _image(f"{param}.content[{position}]", part)
        elif part.text:
            yield Segment(part.text)


def _image(param: str, part: ImagePart) -> Segment:
    if part.size is None:
        raise ChatRequestError(
            param, "image_count_mismatch", "the image's size is not known; give width and height of every image"
        )
    width, height = part.size
    text = f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
    return Segment(text, True, image=part)


def _system(kind: str, text: str, message: int | None = None) -> _Part:
    return message, (kind, text), (*_open("message", role="system", type=kind), Segment(text), *_end_message()), ()


def _open(tag: str, **attributes: str) -> tuple[Segment, ...]:
    if sum(map(len, attributes.values())) > _SHORT_ATTRIBUTES:
        return _open_tag(tag, **attributes)
    return _remembered_open_tag(tag, **attributes)


def _open_tag(tag: str, **attributes: str) -> tuple[Segment, ...]:
    pieces: list[Segment] = [_OPEN, Segment(tag)]
    for key, value in attributes.items():
        pieces += (Segment(f" {key}"), Segment('="'))
        if value:
            pieces.append(Segment(value.replace("&", "&amp;").replace('"', "&quot;")))
        pieces.append(Segment('"'))
    return (*pieces, _SEP)


_remembered_open_tag = lru_cache(maxsize=4096)(_open_tag)


@lru_cache(maxsize=16)
def _close(tag: str) -> tuple[Segment, ...]:
    return (_CLOSE, Segment(tag), _SEP)


def _end_message() -> Sequence[Segment]:
    return (*_close("message"), _END)
