"""What shapes the prompt of a chat completion: messages, tools, formats."""

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

_TEXT_PART = an_object({"type": {"const": "text"}, "text": TEXT, "cache_control": MARK}, "type", "text")
_IMAGE_PART = an_object(
    {
        "type": {"const": "image_url"},
        "image_url": one_of(TEXT, an_object({"url": TEXT, "detail": words("auto", "high")}, "url")),
        "cache_control": MARK,
    },
    "type",
    "image_url",
)
_CONTENT = one_of(TEXT, a_list(one_of(_TEXT_PART, _IMAGE_PART)))
_CALL = an_object(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": an_object({"name": TEXT, "arguments": one_of(TEXT, ANYTHING)}, "name", "arguments"),
    },
    "id",
    "type",
    "function",
)
_NAMED_CHOICE = an_object(
    {"type": {"const": "function"}, "function": an_object({"name": TEXT}, "name")}, "type", "function"
)
_NAMED_SCHEMA = an_object({"name": TEXT, "description": TEXT, "schema": SOME_JSON_SCHEMA, "strict": FLAG}, "schema")

SCHEMAS: dict[str, Schema] = {
    "Tool": an_object(
        {
            "type": {"const": "function"},
            "function": an_object(
                {"name": TEXT, "description": TEXT, "parameters": SOME_JSON_SCHEMA, "strict": FLAG}, "name"
            ),
            "cache_control": MARK,
        },
        "type",
        "function",
    ),
    "Message": one_of(
        an_object(
            {"role": words("system", "developer", "user"), "content": _CONTENT, "name": TEXT, "cache_control": MARK},
            "role",
            "content",
        ),
        an_object({"role": {"const": "system"}, "tools": a_list(ref("Tool"), least=1)}, "role", "tools"),
        an_object(
            {
                "role": {"const": "assistant"},
                "content": or_null(one_of(TEXT, a_list(_TEXT_PART))),
                "reasoning_content": or_null(TEXT),
                "tool_calls": a_list(_CALL),
                "cache_control": MARK,
            },
            "role",
        ),
        an_object(
            {"role": {"const": "tool"}, "content": _CONTENT, "tool_call_id": TEXT, "cache_control": MARK},
            "role",
            "content",
            "tool_call_id",
        ),
    ),
}

PROPERTIES: Schema = {
    "messages": a_list(ref("Message"), least=1),
    "tools": or_null(a_list(ref("Tool"))),
    "tool_choice": or_null(one_of(words("auto", "none", "required"), _NAMED_CHOICE)),
    "response_format": or_null(
        one_of(
            an_object({"type": words("text", "json_object")}, "type"),
            an_object({"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}, "type", "json_schema"),
        )
    ),
    "reasoning_effort": or_null(words("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "thinking": or_null(
        one_of(FLAG, an_object({"type": words("enabled", "disabled"), "keep": {"const": "all"}, "effort": TEXT}))
    ),
    "parallel_tool_calls": or_null(FLAG),
}
"""Of the body of a chat completion, and of everything else that takes one; ``messages`` is required."""
