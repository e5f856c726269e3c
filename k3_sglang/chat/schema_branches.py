"""JSON schemas as alternatives of one JSON type each: references, unions, enums and missing types resolved."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from k3_sglang.chat.arguments import TypeName, type_name
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.schema_check import follows
from k3_sglang.chat.schema_keywords import StepBudget, resolve, usable

JSON_TYPES: tuple[TypeName, ...] = ("object", "array", "string", "number", "boolean", "null")
_BY_NAME: dict[str, TypeName] = {"integer": "number"}
_BY_NAME.update((name, name) for name in JSON_TYPES)

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
        elif "const" in schema or "enum" in schema:
            yield from self._listed(schema)
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

    def _listed(self, schema: dict[str, Any]) -> Iterator[Branch]:
        """Values given one by one, those that the keywords beside them allow."""
        key = "const" if "const" in schema else "enum"
        values: list[Any] = [schema["const"]] if key == "const" else schema["enum"]
        if not self._budget.spend(len(values)):
            yield from self.of(True)
            return
        beside = {name: rule for name, rule in schema.items() if name != key}
        for value in values:
            allowed = follows(value, beside, self._document, self._budget) if beside else True
            if allowed is None:
                self._note(f"{key} beside what cannot be decided")
            if allowed is not False:
                yield type_name(value), {"const": value}

    def _referred(self, schema: dict[str, Any], seen: tuple[str, ...]) -> Iterator[Branch]:
        reference: str = schema["$ref"]
        target = resolve(self._document, reference)
        if target is None or reference in seen:
            self._note(f"$ref {reference}")
            target = True
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        yield from self.of(self._merge(rest, target), (*seen, reference))

    def _joined(self, schema: dict[str, Any]) -> Any:
        joined: dict[str, Any] | bool = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            if is_object(part) and isinstance(reference := part.get("$ref"), str):
                target = resolve(self._document, reference)
                if target is None:
                    self._note(f"$ref {reference}")
                    target = True
                joined = self._merge(joined, target)
                part = {key: value for key, value in part.items() if key != "$ref"}
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
            merged["properties"] = _joined_members(base["properties"], other["properties"])
        if "required" in base and "required" in other:
            merged["required"] = list(dict.fromkeys((*base["required"], *other["required"])))
        if _is_closed(base, other) or _is_closed(other, base):
            self._note("additionalProperties beside properties of another schema")
        clash = {key for key in base.keys() & other.keys() if base[key] != other[key]} - {"properties", "required"}
        if clash:
            self._note(f"{', '.join(sorted(clash))} given twice")
        return merged


def _joined_members(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of two schemas that both apply."""
    both = {name: {"allOf": [base[name], other[name]]} for name in base if name in other and base[name] != other[name]}
    return {**base, **other, **both}


def _is_closed(schema: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `schema` says what its undeclared properties are, and `other` declares some of them."""
    if schema.get("additionalProperties", True) in (True, {}):
        return False
    return not other.get("properties", {}).keys() <= schema.get("properties", {}).keys()


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
