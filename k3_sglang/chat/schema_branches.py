"""JSON schemas as alternatives of one JSON type each: references, unions, enums and missing types resolved."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from k3_sglang.chat.arguments import TypeName, type_name
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.schema_keywords import StepBudget, usable

JSON_TYPES: tuple[TypeName, ...] = ("object", "array", "string", "number", "boolean", "null")
_BY_NAME: dict[str, TypeName] = {"integer": "number"}
_BY_NAME.update((name, name) for name in JSON_TYPES)

# A reference into a list counts its items; no schema has more than this many digits of them.
_INDEX_DIGITS = 9

Branch = tuple[TypeName, dict[str, Any]]


class SchemaBranches:
    """Alternatives of the schemas in one document; `note` hears of what they cannot say.

    `any_types` are the types offered where a schema allows all of them, and where `budget` is used up.
    """

    def __init__(
        self, document: Any, any_types: tuple[TypeName, ...], note: Callable[[str], None], budget: StepBudget
    ) -> None:
        self._document = document
        self._any_types = any_types
        self._note = note
        self._budget = budget

    def of(self, schema: Any, seen: tuple[str, ...] = ()) -> Iterator[Branch]:
        """The alternatives of a schema; `seen` are the references that led to it."""
        if not self._budget.spend():
            self._note("schema too large")
            schema = True
        if schema is True or schema == {}:
            for kind in self._any_types:
                yield kind, {}
        elif is_object(schema):
            yield from self._of_object(usable(schema, self._note), seen)
        elif schema is not False:
            self._note("not a schema")
            yield from self.of(True, seen)

    def _of_object(self, schema: dict[str, Any], seen: tuple[str, ...]) -> Iterator[Branch]:
        if "$ref" in schema:
            yield from self._referred(schema, seen)
        elif "allOf" in schema:
            yield from self.of(self._joined(schema), seen)
        elif union := next((key for key in ("anyOf", "oneOf") if key in schema), ""):
            base = {key: value for key, value in schema.items() if key != union}
            for alternative in schema[union]:
                yield from self.of(self._merge(base, alternative), seen)
        elif "const" in schema:
            yield type_name(schema["const"]), {"const": schema["const"]}
        elif "enum" in schema:
            values = self._enum(schema)
            if not self._budget.spend(len(values)):
                yield from self.of(True)
                return
            for value in values:
                yield type_name(value), {"const": value}
        else:
            yield from self._typed(schema)

    def _typed(self, schema: dict[str, Any]) -> Iterator[Branch]:
        kinds = schema.get("type")
        if kinds is None:
            kinds = [*_implied_types(schema)] or list(self._any_types)
        for kind in kinds if is_list(kinds) else [kinds]:
            if kind in _BY_NAME:
                yield _BY_NAME[kind], {**schema, "type": kind}
            else:
                self._note(f"type {kind!r}")
                yield from self.of(True)

    def _enum(self, schema: dict[str, Any]) -> list[Any]:
        values: list[Any] = schema["enum"]
        kinds = schema.get("type")
        if kinds is None:
            return values
        allowed = {_BY_NAME.get(kind) for kind in (kinds if is_list(kinds) else [kinds])}
        return [value for value in values if type_name(value) in allowed]

    def _referred(self, schema: dict[str, Any], seen: tuple[str, ...]) -> Iterator[Branch]:
        reference: str = schema["$ref"]
        target = _resolve(self._document, reference)
        if target is None or reference in seen:
            self._note(f"$ref {reference}")
            target = True
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        yield from self.of(self._merge(rest, target), (*seen, reference))

    def _joined(self, schema: dict[str, Any]) -> Any:
        joined: dict[str, Any] | bool = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            if is_object(part) and isinstance(part.get("$ref"), str):
                part = _resolve(self._document, part["$ref"]) or True
            joined = self._merge(joined, part)
        return joined

    def _merge(self, base: dict[str, Any] | bool, other: Any) -> dict[str, Any] | bool:
        """Both schemas at once, for the keywords that combine simply; `base` as `usable` or this left it."""
        if isinstance(base, bool) or other is False:
            return False
        if not is_object(other):
            if other is not True:
                self._note("not a schema")
            return base
        other = usable(other, self._note)
        merged = {**base, **other}
        if "properties" in base and "properties" in other:
            merged["properties"] = {**base["properties"], **other["properties"]}
        if "required" in base and "required" in other:
            merged["required"] = list(dict.fromkeys((*base["required"], *other["required"])))
        clash = {key for key in base.keys() & other.keys() if base[key] != other[key]} - {"properties", "required"}
        if clash:
            self._note(f"{', '.join(sorted(clash))} given twice")
        return merged


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
        elif is_list(node) and key.isdecimal() and len(key) <= _INDEX_DIGITS and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
