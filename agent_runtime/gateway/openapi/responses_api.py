"""Requests of OpenAI's Responses API."""

from agent_runtime.gateway.openapi.words import (
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

_INPUT_PART = one_of(
    an_object({"type": {"const": "input_text"}, "text": TEXT}, "type", "text"),
    an_object(
        {"type": {"const": "input_image"}, "image_url": TEXT, "detail": words("auto", "high")}, "type", "image_url"
    ),
)
_OUTPUT_TEXT = an_object({"type": {"const": "output_text"}, "text": TEXT}, "type", "text", more=True)
_STATUS = words("in_progress", "completed", "incomplete")
_NAMED = an_object({"type": {"const": "function"}, "name": TEXT}, "type", "name")

SCHEMAS: dict[str, Schema] = {
    "Item": one_of(
        an_object(
            {
                "type": {"const": "message"},
                "role": words("user", "system", "developer"),
                "content": one_of(TEXT, a_list(_INPUT_PART, least=1)),
            },
            "role",
            "content",
        ),
        an_object(
            {
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "content": one_of(TEXT, a_list(_OUTPUT_TEXT, least=1)),
                "status": _STATUS,
            },
            "role",
            "content",
        ),
        an_object(
            {
                "type": {"const": "reasoning"},
                "summary": a_list(an_object({"type": {"const": "summary_text"}, "text": TEXT}, "type", "text")),
                "content": a_list(an_object({"type": {"const": "reasoning_text"}, "text": TEXT}, "type", "text")),
                "encrypted_content": or_null(TEXT),
            },
            "type",
            "summary",
        ),
        an_object(
            {
                "type": {"const": "function_call"},
                "call_id": TEXT,
                "name": TEXT,
                "arguments": TEXT,
                "status": _STATUS,
            },
            "type",
            "call_id",
            "name",
            "arguments",
        ),
        an_object(
            {"type": {"const": "function_call_output"}, "call_id": TEXT, "output": one_of(TEXT, a_list(_INPUT_PART))},
            "type",
            "call_id",
            "output",
        ),
        an_object({"type": {"const": "item_reference"}, "id": TEXT}, "type", "id"),
    ),
    "FlatTool": an_object(
        {
            "type": {"const": "function"},
            "name": TEXT,
            "description": or_null(TEXT),
            "parameters": or_null(SOME_JSON_SCHEMA),
            "strict": or_null(FLAG),
            "cache_control": MARK,
        },
        "type",
        "name",
    ),
}

PROPERTIES: Schema = {
    "input": one_of(TEXT, a_list(ref("Item"), least=1)),
    "tools": or_null(a_list(ref("FlatTool"))),
    "tool_choice": or_null(
        one_of(
            words("auto", "none", "required"),
            _NAMED,
            an_object(
                {"type": {"const": "allowed_tools"}, "mode": words("auto", "required"), "tools": a_list(_NAMED)},
                "type",
                "mode",
                "tools",
            ),
        )
    ),
    "text": or_null(
        an_object(
            {
                "verbosity": {"const": "medium"},
                "format": one_of(
                    an_object({"type": words("text", "json_object")}, "type"),
                    an_object(
                        {
                            "type": {"const": "json_schema"},
                            "name": TEXT,
                            "description": TEXT,
                            "schema": SOME_JSON_SCHEMA,
                            "strict": FLAG,
                        },
                        "type",
                        "schema",
                    ),
                ),
            }
        )
    ),
    "reasoning": or_null(
        an_object(
            {
                "effort": or_null(words("none", "minimal", "low", "medium", "high", "xhigh", "max")),
                "summary": or_null({"const": "auto"}),
            }
        )
    ),
}
"""Beside the fields of ``ResponseFields`` and those that mean what they mean in chat."""
