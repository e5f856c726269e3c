"""JSON schemas as alternatives of one JSON type each: references, unions, enums and missing types resolved."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from k3_sglang.chat.arguments import TypeName, type_name
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.schema_check import follows, is_equal
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
            alternatives = (self.of(self._merge(base, alternative), seen) for alternative in schema[union])
            yield from self._exclusive(alternatives) if union == "oneOf" else chain.from_iterable(alternatives)
        elif "const" in schema or "enum" in schema:
            yield from self._listed(schema)
        else:
            yield from self._typed(schema)

    def _exclusive(self, alternatives: Iterable[Iterator[Branch]]) -> Iterator[Branch]:
        """The branches of alternatives of which only one may hold, taken as any of them."""
        before: list[Branch] = []
        exclusive = True
        for alternative in alternatives:
            branches = list(alternative)
            exclusive = exclusive and all(self._differ(one, other) for one in branches for other in before)
            before += branches
            yield from branches
        if not exclusive:
            self._note("oneOf")

    def _differ(self, one: Branch, other: Branch) -> bool:
        """Whether it is plain that no value is in both: other types, other constants, or other constant members."""
        if not self._budget.spend():
            return False
        (kind, first), (other_kind, second) = one, other
        if kind != other_kind:
            return all("type" in branch or "const" in branch for branch in (first, second))
        if "const" in first and "const" in second:
            return not is_equal(first["const"], second["const"])
        if kind != "object":
            return False
        names = {*first.get("required", ())} & {*second.get("required", ())}
        members = [(_constant(first, name), _constant(second, name)) for name in names]
        return any(a and b and not is_equal(a[0], b[0]) for a, b in members)

    def _typed(self, schema: dict[str, Any]) -> Iterator[Branch]:
        kinds = schema.get("type")
        if kinds is None:
            # Left without a type, which tells that values of other types follow the schema too.
            implied: tuple[TypeName, ...] = (*_implied_types(schema),)
            for one in implied or self._any_types:
                yield one, schema
            return
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
        if _is_list_of_two(base, other) or _is_list_of_two(other, base):
            self._note("items beside prefixItems of another schema")
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


def _is_list_of_two(schema: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `schema` has a rule for all items, of which `other` has its own for the first."""
    if "prefixItems" in schema or schema.get("items", True) in (True, {}):
        return False
    return bool(other.get("prefixItems"))


def _constant(schema: Mapping[str, Any], name: str) -> tuple[Any] | None:
    """The one value that an object's member may have, if its schema gives it as a constant."""
    member = schema.get("properties", {}).get(name)
    if not is_object(member):
        return None
    listed = [member["const"]] if "const" in member else member.get("enum")
    return (listed[0],) if is_list(listed) and len(listed) == 1 else None


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
