"""JSON schemas as alternatives of one JSON type each: references, unions, enums and missing types resolved."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from k3_sglang.chat.arguments import TypeName, type_name
from k3_sglang.chat.json_types import is_list, is_object

JSON_TYPES: tuple[TypeName, ...] = ("object", "array", "string", "number", "boolean", "null")
_BY_NAME: dict[str, TypeName] = {"integer": "number"}
_BY_NAME.update((name, name) for name in JSON_TYPES)

# Keywords that say nothing about which values are allowed, and those that the rules express.
_ANNOTATIONS = frozenset(
    ("$schema", "$id", "$defs", "definitions", "$comment", "$anchor", "title", "description", "default", "examples")
    + ("deprecated", "readOnly", "writeOnly", "format", "nullable", "strict")
)
_EXPRESSED = frozenset(
    ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "properties", "required", "additionalProperties")
    + ("items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum")
    + ("exclusiveMinimum", "exclusiveMaximum")
)


Branch = tuple[TypeName, dict[str, Any]]


class SchemaBranches:
    """Alternatives of the schemas in one document; `note` hears of what they cannot say.

    `any_types` are the types offered where a schema allows all of them.
    """

    def __init__(self, document: Any, any_types: tuple[TypeName, ...], note: Callable[[str], None]) -> None:
        self._document = document
        self._any_types = any_types
        self._note = note

    def of(self, schema: Any, seen: tuple[str, ...] = ()) -> Iterator[Branch]:
        if schema is True or schema == {}:
            for kind in self._any_types:
                yield kind, {}
            return
        if not is_object(schema):
            if schema is not False:
                self._note("not a schema")
                yield from self.of(True, seen)
            return
        self._note_unexpressed(schema)
        schema = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        if "$ref" in schema:
            yield from self._referred(schema, seen)
        elif "allOf" in schema:
            yield from self.of(self._joined(schema), seen)
        elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
            base = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
            for alternative in alternatives if is_list(alternatives) else [True]:
                yield from self.of(self._merge(base, alternative), seen)
        elif "const" in schema:
            yield type_name(schema["const"]), {"const": schema["const"]}
        elif "enum" in schema:
            for value in self._enum(schema):
                yield type_name(value), {"const": value}
        else:
            yield from self._typed(schema)

    def _typed(self, schema: dict[str, Any]) -> Iterator[Branch]:
        kinds = schema.get("type")
        if kinds is None:
            kinds = [*_implied_types(schema)] or list(self._any_types)
        for kind in kinds if is_list(kinds) else [kinds]:
            if isinstance(kind, str) and kind in _BY_NAME:
                yield _BY_NAME[kind], {**schema, "type": kind}
            else:
                self._note(f"type {kind!r}")
                yield from self.of(True)

    def _enum(self, schema: dict[str, Any]) -> Iterable[Any]:
        values = schema["enum"]
        if not is_list(values):
            self._note("enum is not a list")
            return ()
        kinds = schema.get("type")
        allowed = {"integer" if kind == "integer" else kind for kind in (kinds if is_list(kinds) else [kinds])}
        if kinds is None:
            return values
        return [v for v in values if type_name(v) in allowed or (type_name(v) == "number" and "integer" in allowed)]

    def _referred(self, schema: dict[str, Any], seen: tuple[str, ...]) -> Iterator[Branch]:
        reference = str(schema["$ref"])
        target = _resolve(self._document, reference)
        if target is None or reference in seen:
            self._note(f"$ref {reference}")
            target = True
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        yield from self.of(self._merge(rest, target), (*seen, reference))

    def _joined(self, schema: dict[str, Any]) -> Any:
        joined: Any = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"] if is_list(schema["allOf"]) else []:
            if is_object(part) and "$ref" in part:
                part = _resolve(self._document, str(part["$ref"])) or True
            joined = self._merge(joined, part)
        return joined

    def _merge(self, base: dict[str, Any], other: Any) -> Any:
        """Both schemas at once, for the keywords that combine simply."""
        if not base or not is_object(other):
            return other if not base or other is False else base
        merged = {**base, **other}
        for key in ("properties", "$defs"):
            if key in base and key in other:
                merged[key] = {**base[key], **other[key]}
        if "required" in base and "required" in other:
            merged["required"] = list(dict.fromkeys((*base["required"], *other["required"])))
        clash = {key for key in base.keys() & other.keys() if base[key] != other[key]} - _ANNOTATIONS
        clash -= {"properties", "required"}
        if clash:
            self._note(f"{', '.join(sorted(clash))} given twice")
        return merged

    def _note_unexpressed(self, schema: dict[str, Any]) -> None:
        for key in schema.keys() - _ANNOTATIONS - _EXPRESSED:
            self._note(key)


def _implied_types(schema: Mapping[str, Any]) -> Iterator[TypeName]:
    """Types that a schema without `type` is about, read off its keywords."""
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        yield "object"
    if schema.keys() & {"items", "prefixItems", "minItems", "maxItems"}:
        yield "array"
    if schema.keys() & {"minLength", "maxLength", "pattern"}:
        yield "string"
    if schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}:
        yield "number"


def _resolve(document: Any, reference: str) -> Any:
    """The schema a local reference points at; None if there is none."""
    if not reference.startswith("#"):
        return None
    node = document
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if is_object(node) and key in node:
            node = node[key]
        elif is_list(node) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
