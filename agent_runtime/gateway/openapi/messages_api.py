"""Requests and errors of Anthropic's Messages API."""

from agent_runtime.gateway.anthropic.routes import VERSIONS
from agent_runtime.gateway.openapi.words import (
    ANYTHING,
    FLAG,
    MARK,
    SOME_JSON_SCHEMA,
    TEXT,
    Schema,
    a_list,
    an_object,
    one_of,
    or_null,
    ref,
    words,
)

_COUNT: Schema = {"type": "integer", "minimum": 1}
_TEXT_BLOCK = an_object({"type": {"const": "text"}, "text": TEXT, "cache_control": MARK}, "type", "text")
_SOURCE = one_of(
    an_object({"type": {"const": "base64"}, "media_type": TEXT, "data": TEXT}, "type", "media_type", "data"),
    an_object({"type": {"const": "url"}, "url": TEXT}, "type", "url"),
)
_IMAGE_BLOCK = an_object({"type": {"const": "image"}, "source": _SOURCE, "cache_control": MARK}, "type", "source")
_RESULT_BLOCK = an_object(
    {
        "type": {"const": "tool_result"},
        "tool_use_id": TEXT,
        "content": one_of(TEXT, a_list(one_of(_TEXT_BLOCK, _IMAGE_BLOCK))),
        "is_error": FLAG,
        "cache_control": MARK,
    },
    "type",
    "tool_use_id",
)
_THINKING_BLOCK = an_object({"type": {"const": "thinking"}, "thinking": TEXT, "signature": TEXT}, "type", "thinking")
_CALL_BLOCK = an_object(
    {"type": {"const": "tool_use"}, "id": TEXT, "name": TEXT, "input": ANYTHING}, "type", "id", "name", "input"
)
_CHOICE = an_object(
    {"type": words("auto", "any", "none", "tool"), "name": TEXT, "disable_parallel_tool_use": FLAG}, "type"
)

SCHEMAS: dict[str, Schema] = {
    "AnthropicMessage": one_of(
        an_object(
            {
                "role": {"const": "user"},
                "content": one_of(TEXT, a_list(one_of(_TEXT_BLOCK, _IMAGE_BLOCK, _RESULT_BLOCK), least=1)),
            },
            "role",
            "content",
        ),
        an_object(
            {
                "role": {"const": "assistant"},
                "content": one_of(TEXT, a_list(one_of(_TEXT_BLOCK, _THINKING_BLOCK, _CALL_BLOCK), least=1)),
            },
            "role",
            "content",
        ),
    ),
    "AnthropicTool": an_object(
        {"name": TEXT, "description": TEXT, "input_schema": SOME_JSON_SCHEMA, "cache_control": MARK},
        "name",
        "input_schema",
    ),
    "AnthropicError": an_object(
        {
            "type": {"const": "error"},
            "error": an_object({"type": TEXT, "message": TEXT}, "type", "message"),
            "k3": an_object({"code": TEXT, "param": or_null(TEXT)}, "code", "param"),
            "request_id": TEXT,
        },
        "type",
        "error",
        "request_id",
    ),
}

_PROMPT: Schema = {
    "model": TEXT,
    "messages": a_list(ref("AnthropicMessage"), least=1),
    "system": one_of(TEXT, a_list(_TEXT_BLOCK)),
    "tools": a_list(ref("AnthropicTool")),
    "tool_choice": _CHOICE,
    "thinking": an_object(
        {
            "type": words("enabled", "adaptive", "disabled"),
            "budget_tokens": _COUNT,
            "display": words("summarized", "omitted", "updates"),
        },
        "type",
    ),
    "output_config": an_object(
        {
            "effort": words("low", "medium", "high", "xhigh", "max"),
            "format": an_object({"type": {"const": "json_schema"}, "schema": SOME_JSON_SCHEMA}, "type", "schema"),
        }
    ),
}
MESSAGES_REQUEST = an_object(
    {
        **_PROMPT,
        "max_tokens": _COUNT,
        "stop_sequences": a_list({"type": "string", "minLength": 1, "maxLength": 256}, most=16),
        "stream": FLAG,
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        "metadata": an_object({"user_id": {"type": "string", "maxLength": 512}}),
        "service_tier": words("auto", "standard_only"),
        "cache_control": MARK,
    },
    "model",
    "messages",
    "max_tokens",
)
COUNT_REQUEST = an_object(_PROMPT, "model", "messages")

VERSION_HEADER: Schema = {
    "name": "anthropic-version",
    "in": "header",
    "required": False,
    "schema": words(*VERSIONS),
}
