"""The conversation vocabulary shared by the serving plugin and the agent runtime."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
Effort: TypeAlias = Literal["low", "high", "max"]
Channel: TypeAlias = Literal["think", "response"]
JSONObject: TypeAlias = dict[str, Any]


class Segment(NamedTuple):
    """One piece of a prompt, tokenised on its own.

    With `allow_special` the spelling of control tokens in `text` becomes those tokens; without it the
    same characters stay ordinary text. A segment with `ids` stands for exactly these ids. A segment with
    `image` holds that image's one `<|media_pad|>`.
    """

    text: str
    allow_special: bool = False
    ids: tuple[int, ...] | None = None
    image: "ImagePart | None" = None


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text inside a list content. `cache_ttl_s`: see `Message`."""

    text: str
    cache_ttl_s: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image inside a list content.

    `size` is the (width, height) in pixels before any resizing. `digest` identifies the content, whatever the
    source was called; `tokens` is how many positions the engine puts in the place of its one `<|media_pad|>`.
    """

    source: str
    size: tuple[int, int] | None = None
    digest: bytes = b""
    tokens: int = 1
    cache_ttl_s: int | None = field(default=None, compare=False)


ImageResolver: TypeAlias = Callable[[str, str], ImagePart]
"""What finds the size of an image: called with the source as sent and the path of the part in the request, for one
image after the other. Raises ChatRequestError for an image that is not accepted."""

ContentPart: TypeAlias = TextPart | ImagePart
Content: TypeAlias = str | tuple[ContentPart, ...] | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call made by the assistant; `arguments` is JSON text as received or produced, `id` "" if absent.

    `upstream_id` is the id that another server gave the call, where its gateway gave the client one of its own.
    """

    id: str
    name: str
    arguments: str
    upstream_id: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; fields that a role does not use stay at their defaults.

    `name` is the participant's name, or the tool's name on a tool message. `tools` declares further tools
    in place (system messages only). `recorded_ids` are the ids the model generated for this assistant turn,
    from right after the generation prompt to `<|end_of_msg|>` inclusive; they replace the rendered turn.
    `recorded_start` is the channel the generation prompt of that turn had left open. `cache_ttl_s` is set where the
    client marked the end of this message as one to go on from (`cache_control`): seconds to keep it. `signature` is
    opaque text that names the recorded turn an assistant message is. These two are no part of the conversation, so
    messages that differ in them only are equal.
    """

    role: Role
    content: Content = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    tools: tuple[JSONObject, ...] | None = None
    recorded_ids: tuple[int, ...] | None = None
    recorded_start: Channel = "think"
    cache_ttl_s: int | None = field(default=None, compare=False)
    signature: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NamedTool:
    """`tool_choice` that names one declared tool."""

    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Raw JSON demanded as the answer; `schema` is None for any JSON object."""

    kind: Literal["json_object", "json_schema"]
    schema: JSONObject | bool | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Everything of a chat completion request that shapes the prompt.

    `tool_choice` is None when the client sent none, which means "auto" and renders like it.
    `effort` None renders no effort directive; `parse_request` fills in the default "max".
    `tools_cache_ttl_s` is `cache_ttl_s` of the tools.
    """

    messages: tuple[Message, ...]
    tools: tuple[JSONObject, ...] = ()
    tool_choice: ToolChoice | None = None
    response_format: ResponseFormat | None = None
    effort: Effort | None = "max"
    thinking: bool = True
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    tools_cache_ttl_s: int | None = field(default=None, compare=False)

    @property
    def start(self) -> Channel:
        """The channel that the generation prompt leaves open."""
        return "think" if self.thinking else "response"

    @property
    def declared_tools(self) -> tuple[JSONObject, ...]:
        """Request-level tools, then those declared by system messages, in order."""
        dynamic = (tool for message in self.messages for tool in message.tools or ())
        return (*self.tools, *dynamic)

    @property
    def tools_callable(self) -> bool:
        """Whether the answer may hold calls: a tool is declared and `tool_choice` is not "none"."""
        return self.tool_choice != "none" and bool(self.declared_tools)
