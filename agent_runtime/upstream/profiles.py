"""What each kind of K3 server takes and how it spells it; the sources are in docs/upstreams.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

ProfileName: TypeAlias = Literal["moonshot", "vllm", "sglang", "tokenspeed", "generic"]
ThinkingField: TypeAlias = Literal["reasoning_content", "reasoning"]

_NONE: Mapping[str, Any] = MappingProxyType({})
_TEMPLATE_THINKING_OFF = MappingProxyType({"chat_template_kwargs": {"thinking": False}})
_CHOICES = frozenset(("auto", "none", "required", "named"))
_FORMATS = frozenset(("json_object", "json_schema"))
_STANDARD = frozenset(("temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias"))
_OPEN_ENGINES = _STANDARD | {"top_k", "min_p", "repetition_penalty"}


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of server. What it does not honour is refused, never left out.

    ``n`` and ``stop`` are no part of it: the gateway sends one request for each choice, and finds stop strings itself.
    """

    name: ProfileName
    thinking_field: ThinkingField
    """Where a message has its thinking, sent and received; in answers the other name is read too."""
    sampling: frozenset[str]
    """Sampling fields that are passed on."""
    fixed: Mapping[str, float] = field(default_factory=dict[str, float])
    """Sampling fields that the server allows one value of: sent with this value only."""
    thinking_off: Mapping[str, Any] | None = None
    """Fields that turn thinking off; None where it always thinks."""
    tool_choices: frozenset[str] = _CHOICES
    response_formats: frozenset[str] = _FORMATS
    strict_tools: bool = True
    """``strict: true`` in a function's declaration holds the arguments to their schema."""
    single_calls: bool = True
    """``parallel_tool_calls: false``."""
    dynamic_tools: bool = True
    """System messages that declare tools."""
    images: bool = True
    budget_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    session_field: Literal["prompt_cache_key"] | None = None
    """The field that names a session to the server's cache."""
    omits_empty_content: bool = False
    """A turn of calls without text is sent without ``content``."""
    think_tags: bool = False
    """Thinking may arrive as ``<think>...</think>`` at the beginning of the content."""


PROFILES: Mapping[ProfileName, Profile] = MappingProxyType(
    {
        "moonshot": Profile(
            "moonshot",
            "reasoning_content",
            sampling=frozenset(),
            fixed={"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.0, "presence_penalty": 0.0},
            tool_choices=_CHOICES - {"named"},
            single_calls=False,
            session_field="prompt_cache_key",
            omits_empty_content=True,
        ),
        "vllm": Profile("vllm", "reasoning", _OPEN_ENGINES | {"seed"}, thinking_off=_TEMPLATE_THINKING_OFF),
        # Seeds: ignored unless the server samples deterministically, which it does not tell.
        "sglang": Profile(
            "sglang", "reasoning_content", _OPEN_ENGINES, thinking_off=MappingProxyType({"reasoning_effort": "none"})
        ),
        "tokenspeed": Profile(
            "tokenspeed", "reasoning_content", _OPEN_ENGINES, thinking_off=_TEMPLATE_THINKING_OFF, dynamic_tools=False
        ),
        "generic": Profile(
            "generic",
            "reasoning_content",
            _STANDARD | {"seed"},
            dynamic_tools=False,
            budget_field="max_tokens",
            think_tags=True,
        ),
    }
)
