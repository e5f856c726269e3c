"""Short forms of JSON Schema, as far as the document needs them."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object", "additionalProperties": True}
SOME_JSON_SCHEMA: Schema = {
    "type": "object",
    "description": "A JSON Schema; K3's grammar holds the model to what it can express of it.",
    "properties": {"type": {"enum": ["object", "string", "integer", "number", "boolean", "array", "null"]}},
}
MARK: Schema = {
    "type": "object",
    "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h"]}},
    "required": ["type"],
    "additionalProperties": False,
}


def ref(name: str) -> Schema:
    """A schema of the components."""
    return {"$ref": f"#/components/schemas/{name}"}


def a_list(items: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    """A list."""
    bounds: Schema = {"minItems": least} if least else {}
    if most is not None:
        bounds["maxItems"] = most
    return {"type": "array", "items": items, **bounds}


def one_of(*alternatives: Schema) -> Schema:
    """Any of some forms."""
    return {"anyOf": list(alternatives)}


def or_null(schema: Schema) -> Schema:
    """A value that may be left out by saying null."""
    return one_of(schema, {"type": "null"})


def words(*values: str) -> Schema:
    """One of some words."""
    return {"type": "string", "enum": list(values)}


def an_object(properties: Schema, *required: str, more: bool = False) -> Schema:
    """An object; unless there may be ``more``, of these properties only."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": more,
    }
