"""JSON schemas to grammar rules for JSON text, exact or loosened with a note, never an error."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from k3_sglang.chat.arguments import TypeName
from k3_sglang.chat.canonical import canonical_json
from k3_sglang.chat.grammar_rules import (
    MAX_EXCLUDED_CHARS,
    Rules,
    char_set,
    choice,
    integers,
    literal,
    repeat,
    words_except,
)
from k3_sglang.chat.grammar_strings import JSON_CHARS, CountedLengths, json_string
from k3_sglang.chat.json_types import is_list
from k3_sglang.chat.schema_branches import JSON_TYPES, Branch, SchemaBranches
from k3_sglang.chat.schema_keywords import StepBudget

PRINTABLE = ((0x20, 0x7E),)
_PRINTABLE_JSON = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E))
_MAX_RULES = 20_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long free parts may get; None where the schema alone decides."""

    space: str
    string_chars: int | None
    more_items: int | None
    integer_limit: int
    optional_members: bool


# A trained model: room for any style of JSON, white space limited so that it cannot be filled forever.
FREE = Bounds('(" " | "\\n" [ ]{0,40})?', None, None, 10**18 - 1, True)
# Untrained weights: everything short.
TIGHT = Bounds('""', 24, 2, 999, False)


class SchemaRules:
    """Rules for the values of one schema document; `loosened` collects what they could not express."""

    def __init__(
        self,
        rules: Rules,
        document: Any,
        bounds: Bounds,
        path: str,
        loosened: list[str],
        budget: StepBudget,
        lengths: CountedLengths,
    ) -> None:
        any_types: tuple[TypeName, ...] = ("string",) if bounds is TIGHT else JSON_TYPES
        self.rules = rules
        self.bounds = bounds
        self.path = path
        self.loosened = loosened
        self._alternatives = SchemaBranches(document, any_types, self.loosen, budget)
        self._lengths = lengths
        self._known: dict[str, str] = {}

    def value(self, schema: Any) -> str:
        """A rule for JSON text that the schema allows."""
        key = canonical_json(schema)
        known = self._known.get(key)
        if known is not None:
            return known
        name = self._known[key] = self.rules.reserve("value")
        parts = [self.of_type(kind, branch) for kind, branch in self.branches(schema)]
        return self.rules.define(name, choice(dict.fromkeys(parts)))

    def branches(self, schema: Any) -> list[Branch]:
        """The schema as alternatives of one JSON type each; contradictions are loosened to anything."""
        if len(self.rules) > _MAX_RULES:
            self.loosen("schema too large")
            schema = True
        found = list(self._alternatives.of(schema))
        if not found:
            self.loosen("no value allowed")
            found = list(self._alternatives.of(True))
        return found

    def of_type(self, kind: TypeName, schema: Mapping[str, Any]) -> str:
        """A rule for JSON text of one type; `schema` as `branches` gave it."""
        if "const" in schema:
            return literal(json.dumps(schema["const"], ensure_ascii=False))
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                low, high = self.lengths(schema)
                if self.bounds is FREE:
                    return json_string(self.rules, low, high)
                return self.rules.add("string", f'"\\"" {repeat(char_set(_PRINTABLE_JSON), low, high)} "\\""')
            case "number":
                return self.rules.add("number", self._number(schema))
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'

    def lengths(self, schema: Mapping[str, Any]) -> tuple[int, int | None]:
        """Least and greatest number of characters of a string."""
        low: int = schema.get("minLength", 0)
        high: int | None = schema.get("maxLength")
        if self.bounds.string_chars is not None:
            high = max(low, min(self.bounds.string_chars, self.bounds.string_chars if high is None else high))
        if high is not None and high < low:
            self.loosen("minLength over maxLength")
            high = low
        if self.bounds is TIGHT:
            return low, high
        counted = self._lengths.countable(low, high)
        for name, wanted, kept in zip(("minLength", "maxLength"), (low, high), counted, strict=True):
            if kept != wanted:
                self.loosen(f"{name} {wanted}")
        return counted

    # Types ----------------------------------------------------------------------------------------

    def _number(self, schema: Mapping[str, Any]) -> str:
        limit = self.bounds.integer_limit
        low, high = _integer_bounds(schema)
        whole = schema.get("type") == "integer"
        bounded = low is not None or high is not None
        if not whole and bounded and self.bounds is FREE:
            self.loosen("range of a non-integer number")
            low = high = None
        low, high = _default_bounds(low, high, limit)
        if low > high:
            self.loosen("empty range")
            low, high = 0, limit
        if "multipleOf" in schema:
            multiples = _multiples(schema["multipleOf"], low, high) if self.bounds is TIGHT else None
            if multiples is not None:
                return multiples
            self.loosen("multipleOf")
        digits = integers(low, high)
        if whole or self.bounds is TIGHT:
            return digits
        return f'({digits} | "-0") ("." [0-9]{{1,17}})? ([eE] [+-]? [0-9]{{1,3}})?'

    def _array(self, schema: Mapping[str, Any]) -> str:
        space = self.bounds.space
        first = schema.get("prefixItems")
        least: int = schema.get("minItems", 0)
        most: int | None = schema.get("maxItems")
        given: list[Any] = first[:most] if is_list(first) else []
        fixed = [self.value(item) for item in given]
        items = schema.get("items", not fixed)
        if items is False:
            most = len(fixed)
        if most is not None and least > most:
            self.loosen(f"at least {least} items where at most {most} are allowed")
        low = max(0, least - len(fixed))
        high = None if most is None else max(low, most - len(fixed))
        if self.bounds.more_items is not None:
            high = min(low + self.bounds.more_items, low + self.bounds.more_items if high is None else high)
        if items is False or high == 0:
            low, more = 0, ""
        else:
            item = self.value(items)
            more = f'("," {space} {item}){{{max(low - (not fixed), 0)},{"" if high is None else high - (not fixed)}}}'
            if not fixed:
                more = f"{item} {more}" if low else f"({item} {more})?"
        listed = f' "," {space} '.join(fixed)
        return self.rules.add("array", f'"[" {space} {listed} {more} {space} "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        space = self.bounds.space
        members = self.members(schema, nested=True)
        pairs = [(f'{literal(_quote(m.name))} {space} ":" {space} {self.value(m.schema)}', m.required) for m in members]
        more = self._additional(schema, [member.name for member in members])
        tail = f'("," {space} {more})*' if more else '""'
        after = self.rules.add("more", tail)
        before = self.rules.add("more", f"({more} {tail})?") if more else '""'
        for pair, required in reversed(pairs):
            # `before` stands where no member precedes, `after` where one does and a comma is due.
            follow = f'"," {space} {pair} {after}'
            start = f"{pair} {after}"
            before = self.rules.add("first", start if required else choice((start, before)))
            after = self.rules.add("next", follow if required else choice((follow, after)))
        return self.rules.add("object", f'"{{" {space} {before} {space} "}}"')

    def members(self, schema: Mapping[str, Any], *, nested: bool) -> list["Member"]:
        """Declared properties in order; required names without a schema follow as additional ones."""
        properties: dict[str, Any] = schema.get("properties", {})
        required: dict[str, None] = dict.fromkeys(schema.get("required", []))
        additional = schema.get("additionalProperties", True)
        named = [Member(name, sub, name in required) for name, sub in properties.items()]
        undeclared = [name for name in required if name not in properties]
        if undeclared and additional is False:
            self.loosen("required properties that are not allowed")
            additional = True
        named += [Member(name, additional, True) for name in undeclared]
        if nested and not self.bounds.optional_members:
            named = [member for member in named if member.required]
        return named

    def additional(self, schema: Mapping[str, Any]) -> Any:
        """Schema of undeclared members, None if there are none; undeclared ones must be asked for explicitly."""
        if self.bounds is TIGHT:
            return None
        allowed = schema.get("additionalProperties", not schema.get("properties"))
        return None if allowed is False else allowed

    def _additional(self, schema: Mapping[str, Any], names: list[str]) -> str:
        allowed = self.additional(schema)
        if allowed is None:
            return ""
        if any(len(name) > MAX_EXCLUDED_CHARS for name in names):
            self.loosen(f"undeclared properties beside a name of more than {MAX_EXCLUDED_CHARS} characters")
            return ""
        space = self.bounds.space
        # Written without escapes, so that no other spelling of a declared name gets past.
        key = words_except(self.rules, names, JSON_CHARS)
        return self.rules.add("pair", f'"\\"" {key} "\\"" {space} ":" {space} {self.value(allowed)}')

    def loosen(self, what: str) -> None:
        """Note what the rules cannot express, once."""
        note = f"{self.path}: {what}"
        if note not in self.loosened:
            self.loosened.append(note)


@dataclass(frozen=True, slots=True)
class Member:
    """A property of an object schema."""

    name: str
    schema: Any
    required: bool


def _quote(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


_LEAST: dict[str, Callable[[float], int]] = {
    "minimum": math.ceil,
    "exclusiveMinimum": lambda value: math.floor(value) + 1,
}
_GREATEST: dict[str, Callable[[float], int]] = {
    "maximum": math.floor,
    "exclusiveMaximum": lambda value: math.ceil(value) - 1,
}


def _integer_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    lows = [rounded(schema[key]) for key, rounded in _LEAST.items() if key in schema]
    highs = [rounded(schema[key]) for key, rounded in _GREATEST.items() if key in schema]
    return max(lows, default=None), min(highs, default=None)


def _default_bounds(low: int | None, high: int | None, limit: int) -> tuple[int, int]:
    if low is None and high is None:
        return -limit, limit
    if low is None and high is not None:
        return min(-limit, high - limit), high
    if low is not None and high is None:
        return low, max(limit, low + limit)
    return low or 0, high or 0


def _multiples(step: Any, low: int, high: int) -> str | None:
    if not isinstance(step, int) or isinstance(step, bool) or step <= 0:
        return None
    first = -(-low // step) * step
    found = range(first, high + 1, step)[:8]
    return choice(literal(str(value)) for value in found) if found else None
