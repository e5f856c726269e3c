"""Requests and turns of the grammar's tests, written by hand in K3's format."""

import json
from pathlib import Path
from typing import Any

USER = {"role": "user", "content": "hi"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def closed(tag: str) -> str:
    """The marker that closes a section."""
    return f"<|close|>{tag}<|sep|>"


def opened(tag: str) -> str:
    """The marker that opens one."""
    return f"<|open|>{tag}<|sep|>"


def argument(key: str, kind: str, value: str) -> str:
    """One argument of a call."""
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


def call(name: str, *arguments: str, index: int = 1) -> str:
    """One call."""
    return opened(f'call tool="{name}" index="{index}"') + "".join(arguments) + closed("call")


def turn(*calls: str, response: str | None = "") -> str:
    """A whole turn after its thinking; without an answer where that is None."""
    text = closed("think")
    if response is not None:
        text += opened("response") + response + closed("response")
    if calls:
        text += opened("tools") + "".join(calls) + closed("tools")
    return text + closed("message") + "<|end_of_msg|>"


def asks(**fields: Any) -> dict[str, Any]:
    """A request with these fields."""
    return {"messages": [USER], **fields}


REQUIRED = asks(tools=TOOLS, tool_choice="required")


# Schemas of one argument `v`, each with (type attribute, text) pairs that are legal and that are not.
SCHEMAS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "argument_schemas.json").read_text("utf-8")
)
NODE = {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}
TREE = {"葉": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "mark": {"$ref": "#/$defs/mark"}}
DEFS = {
    "node": {"type": "object", "properties": NODE, "required": ["v"]},
    "tree": {"type": "object", "properties": TREE, "required": ["葉"]},
    "mark": {"anyOf": [{"const": "x"}, {"const": "y"}]},
}


def tool_of(schema: Any, *, key: str = "v", required: bool = True) -> dict[str, Any]:
    """A tool `f` of one argument."""
    parameters = {"type": "object", "properties": {key: schema}, "$defs": DEFS, "required": [key] if required else []}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}
