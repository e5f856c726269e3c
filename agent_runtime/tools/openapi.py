"""Read an OpenAPI document: its operations as tool schemas, with the place of every parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agent_runtime.tools.signature import JsonSchema, ToolDefinitionError

METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch")
_PLACES: Final = ("path", "query", "header")
_SCHEMAS: Final = "#/components/schemas/"
BODY: Final = "body"
"""Name of the parameter that is the JSON body of a request."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a service as a tool."""

    name: str
    description: str
    method: str
    path: str
    """Path template with `{name}` for each path parameter."""
    places: Mapping[str, tuple[str, str]]
    """Tool parameter → (place, name in the request); the place is path, query, header or body."""
    parameters: JsonSchema


def read_operations(document: Mapping[str, Any], names: Collection[str] | None = None) -> list[Operation]:
    """The operations of an OpenAPI 3 document, sorted by name.

    Args:
        document: the parsed document; references must point into it.
        names: tool names to take; None takes all. A document of a large service makes a long prompt.

    Raises:
        ToolDefinitionError: something that is taken cannot be a tool: a parameter in a cookie, a body that is not
            JSON, a reference that leads nowhere, two operations of one name; or a name is not there.
    """
    version = str(document.get("openapi", ""))
    if not version.startswith("3."):
        raise ToolDefinitionError(f"the document has openapi={version!r}; an OpenAPI 3 document is needed")
    found: dict[str, Operation] = {}
    for path, item in cast("dict[str, dict[str, Any]]", document.get("paths", {})).items():
        for method in METHODS:
            if method not in item:
                continue
            name = _name(method, path, item[method])
            if names is not None and name not in names:
                continue
            if name in found:
                raise ToolDefinitionError(f"two operations are called {name!r}; give them operationIds")
            found[name] = _operation(document, name, method, path, item)
    missing = sorted(set(names or ()) - set(found))
    if missing:
        raise ToolDefinitionError(f"the document has no operations {missing}; it has {sorted(found)}")
    return [found[name] for name in sorted(found)]


def _name(method: str, path: str, operation: Mapping[str, Any]) -> str:
    given = str(operation.get("operationId") or f"{method}_{path}".replace("{", "").replace("}", ""))
    name = re.sub(r"[^A-Za-z0-9_-]", "_", given).strip("_")[:64]
    return name if name[:1].isalpha() else f"{method}_{name}"[:64]


def _operation(document: Mapping[str, Any], name: str, method: str, path: str, item: Mapping[str, Any]) -> Operation:
    operation = item[method]
    places: dict[str, tuple[str, str]] = {}
    properties: dict[str, JsonSchema] = {}
    required: list[str] = []
    inherited = [_resolved(document, p, name) for p in item.get("parameters", [])]
    own = [_resolved(document, p, name) for p in operation.get("parameters", [])]
    merged = {(p["in"], p["name"]): p for p in (*inherited, *own)}
    for (place, given), parameter in merged.items():
        if place not in _PLACES:
            raise ToolDefinitionError(
                f"operation {name!r}: parameter {given!r} is in a {place}; leave the operation out"
            )
        key = given if given not in places and given != BODY else f"{place}_{given}"
        places[key] = (place, given)
        schema = dict(parameter.get("schema", {"type": "string"}))
        _refuse_object(document, schema, name, given)
        properties[key] = {**schema, **_described(parameter)}
        if place == "path" or parameter.get("required"):
            required.append(key)
    if "requestBody" in operation:
        body = _resolved(document, operation["requestBody"], name)
        places[BODY] = (BODY, BODY)
        properties[BODY] = {**_body_schema(body, name), **_described(body)}
        if body.get("required"):
            required.append(BODY)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    text = "\n\n".join(str(operation[key]).strip() for key in ("summary", "description") if operation.get(key))
    schema = _with_definitions(document, parameters, name)
    return Operation(name, text or f"{method.upper()} {path}", method, path, places, schema)


def _body_schema(body: Mapping[str, Any], name: str) -> JsonSchema:
    content: dict[str, Any] = body.get("content", {})
    for kind, media in content.items():
        if kind.partition(";")[0].strip() == "application/json":
            return dict(media.get("schema", {}))
    raise ToolDefinitionError(f"operation {name!r}: its body is {sorted(content)}; only application/json can be sent")


def _described(thing: Mapping[str, Any]) -> JsonSchema:
    return {"description": str(thing["description"])} if thing.get("description") else {}


def _refuse_object(document: Mapping[str, Any], schema: JsonSchema, name: str, given: str) -> None:
    if _resolved(document, schema, name).get("type") == "object":
        raise ToolDefinitionError(
            f"operation {name!r}: parameter {given!r} is an object, which has no one form in a URL; leave it out"
        )


def _resolved(document: Mapping[str, Any], thing: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a reference points to, references behind it included."""
    seen: set[str] = set()
    while "$ref" in thing:
        reference = str(thing["$ref"])
        if reference in seen or not reference.startswith("#/"):
            raise ToolDefinitionError(f"operation {name!r}: the reference {reference!r} leads out of the document")
        seen.add(reference)
        target: Any = document
        for part in reference[2:].split("/"):
            inside: Mapping[str, Any] = cast("Mapping[str, Any]", target) if isinstance(target, Mapping) else {}
            target = inside.get(part.replace("~1", "/").replace("~0", "~"))
            if target is None:
                raise ToolDefinitionError(f"operation {name!r}: the reference {reference!r} leads nowhere")
        thing = cast("Mapping[str, Any]", target)
    return thing


def _with_definitions(document: Mapping[str, Any], schema: JsonSchema, name: str) -> JsonSchema:
    """The schema with its references as `$defs`, and those alone that it uses."""
    definitions: dict[str, Any] = {}
    waiting: list[str] = []

    def local(value: Any) -> Any:
        if isinstance(value, list):
            return [local(item) for item in cast("list[Any]", value)]
        if not isinstance(value, dict):
            return value
        made = {str(key): local(item) for key, item in cast("dict[Any, Any]", value).items()}
        reference = made.get("$ref")
        if isinstance(reference, str):
            if not reference.startswith(_SCHEMAS):
                raise ToolDefinitionError(f"operation {name!r}: the reference {reference!r} is not below {_SCHEMAS}")
            waiting.append(reference.removeprefix(_SCHEMAS))
            made["$ref"] = f"#/$defs/{waiting[-1]}"
        # OpenAPI 3.0 says null in a word of its own.
        if made.pop("nullable", False) is True and isinstance(made.get("type"), str):
            made["type"] = [made["type"], "null"]
        return made

    result = cast("JsonSchema", local(schema))
    while waiting:
        wanted = waiting.pop()
        if wanted not in definitions:
            definitions[wanted] = {}
            definitions[wanted] = local(_resolved(document, {"$ref": f"{_SCHEMAS}{wanted}"}, name))
    return {**result, "$defs": definitions} if definitions else result
