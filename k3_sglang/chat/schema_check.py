"""Whether a JSON value follows a JSON schema: checks what a grammar had to leave open, and filters enumerations."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from k3_sglang.chat.arguments import type_name
from k3_sglang.chat.canonical import canonical_json
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.schema_keywords import StepBudget, is_count, is_number, resolve
from k3_sglang.chat.schema_patterns import pattern_matches, search_steps

MAX_STEPS = 100_000
_SHOWN_CHARS = 60
# So many steps of a pattern's search take as long as one step of a check.
_SEARCH_STEPS = 5_000
# So many values of an enumeration are compared in one step.
_ENUM_VALUES = 8


def schema_problem(value: Any, schema: Any, document: Any = None, budget: StepBudget | None = None) -> str | None:
    """Where `value` breaks `schema` first, as "path: what"; None if it follows it or that cannot be decided.

    `document` is what local references point into, `schema` itself by default. What is not decided counts as
    followed: remote references, patterns that could take long, and everything after the steps of `budget`, by
    default 100,000 of its own.
    """
    checker = _Checker(schema if document is None else document, budget or StepBudget(MAX_STEPS))
    try:
        return checker.problem(value, schema, "")
    except RecursionError:
        return None


def follows(value: Any, schema: Any, document: Any, budget: StepBudget | None = None) -> bool | None:
    """Whether `value` follows `schema`; None if that cannot be decided."""
    try:
        return _Checker(document, budget or StepBudget(MAX_STEPS)).follows(value, schema)
    except RecursionError:
        return None


class _Checker:
    def __init__(self, document: Any, budget: StepBudget) -> None:
        self._document = document
        self._budget = budget
        self._undecided = False

    def follows(self, value: Any, schema: Any) -> bool | None:
        outer, self._undecided = self._undecided, False
        problem = self.problem(value, schema, "")
        undecided, self._undecided = self._undecided, outer
        return None if undecided else problem is None

    def problem(self, value: Any, schema: Any, path: str) -> str | None:
        listed = schema.get("enum") if is_object(schema) else None
        if not self._budget.spend(1 + (len(listed) // _ENUM_VALUES if is_list(listed) else 0)):
            self._undecided = True
            return None
        if schema is False:
            return _at(path, "no value is allowed here")
        if not is_object(schema):
            return None
        return next(self._problems(value, schema, path), None)

    def _problems(self, value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        yield from (_at(path, what) for what in _value_problems(value, schema))
        if isinstance(value, str):
            yield from (_at(path, what) for what in self._text_problems(value, schema))
        elif is_list(value):
            yield from self._list_problems(value, schema, path)
        elif is_object(value):
            yield from self._object_problems(value, schema, path)
        yield from self._combined_problems(value, schema, path)

    def _text_problems(self, value: str, schema: Mapping[str, Any]) -> Iterator[str]:
        yield from _count_problems(len(value), schema, "minLength", "maxLength", "characters")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and self._matches(pattern, value) is False:
            yield f"{_shown(value)} does not match the pattern {pattern[:_SHOWN_CHARS]}"

    def _matches(self, pattern: str, text: str) -> bool | None:
        cost = search_steps(pattern, text)
        if cost is None or not self._budget.spend(cost // _SEARCH_STEPS):
            self._undecided = True
            return None
        return pattern_matches(pattern, text)

    def _list_problems(self, value: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
        for what in _count_problems(len(value), schema, "minItems", "maxItems", "items"):
            yield _at(path, what)
        if schema.get("uniqueItems") is True and len({_canonical(item) for item in value}) < len(value):
            yield _at(path, "an item occurs twice")
        first = schema.get("prefixItems")
        first = first if is_list(first) else []
        for place, item in enumerate(value):
            rule = first[place] if place < len(first) else schema.get("items", True)
            yield from self._each(item, [rule], f"{path}[{place}]")
        if "contains" in schema:
            yield from self._contains_problems(value, schema, path)

    def _contains_problems(self, value: list[Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
        found = [self.follows(item, schema["contains"]) for item in value]
        if None in found:
            self._undecided = True
            return
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        count = found.count(True)
        if (is_count(least) and count < least) or (is_count(most) and count > most):
            yield _at(path, f"{count} items follow `contains`")

    def _object_problems(self, value: dict[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
        for what in _count_problems(len(value), schema, "minProperties", "maxProperties", "properties"):
            yield _at(path, what)
        for name in _names(schema.get("required")):
            if name not in value:
                yield _at(path, f"the property {_shown(name)} is missing")
        for name, needed in _members(schema.get("dependentRequired")):
            missing = next((other for other in _names(needed) if other not in value), None)
            if name in value and missing is not None:
                yield _at(path, f"the property {_shown(missing)} is missing beside {_shown(name)}")
        for name, item in value.items():
            where = f"{path}.{name}" if path else name
            yield from self._each(name, [schema.get("propertyNames", True)], where)
            yield from self._each(item, self._member_rules(name, schema), where)
        present = [rule for name, rule in _members(schema.get("dependentSchemas")) if name in value]
        yield from self._each(value, present, path)

    def _each(self, value: Any, schemas: Iterable[Any], path: str) -> Iterator[str]:
        """The first problem of each schema."""
        for schema in schemas:
            problem = self.problem(value, schema, path)
            if problem is not None:
                yield problem

    def _member_rules(self, name: str, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Schemas of one member: declared, by pattern, or, if it is neither, additional."""
        known = False
        properties = schema.get("properties")
        if is_object(properties) and name in properties:
            known = True
            yield properties[name]
        for pattern, rule in _members(schema.get("patternProperties")):
            matches = self._matches(pattern, name)
            known |= matches is not False
            if matches:
                yield rule
        if not known:
            yield schema.get("additionalProperties", True)

    def _combined_problems(self, value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = resolve(self._document, reference)
            self._undecided |= target is None
            yield from self._each(value, [target], path)
        every = schema.get("allOf")
        yield from self._each(value, every if is_list(every) else (), path)
        yield from (_at(path, what) for what in self._alternative_problems(value, schema))
        if "if" in schema:
            holds = self.follows(value, schema["if"])
            self._undecided |= holds is None
            branch = True if holds is None else schema.get("then" if holds else "else", True)
            yield from self._each(value, [branch], path)

    def _alternative_problems(self, value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
        for key in ("anyOf", "oneOf"):
            rules = schema.get(key)
            if not is_list(rules) or not rules:
                continue
            found = [self.follows(value, rule) for rule in rules]
            if key == "anyOf" and True in found:
                continue
            self._undecided |= None in found
            if None in found:
                continue
            if True not in found:
                yield f"{_shown(value)} follows no alternative of {key}"
            elif found.count(True) > 1:
                yield f"{_shown(value)} follows {found.count(True)} alternatives of oneOf"
        if "not" in schema:
            excluded = self.follows(value, schema["not"])
            self._undecided |= excluded is None
            if excluded:
                yield f"{_shown(value)} follows the schema under `not`"


def _value_problems(value: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if is_list(kinds) and kinds and not any(_is_kind(value, kind) for kind in kinds):
        yield f"got a {type_name(value)}, expected {' or '.join(map(str, kinds))}"
    allowed = schema.get("enum")
    if is_list(allowed) and _canonical(value) not in {_canonical(item) for item in allowed}:
        yield f"{_shown(value)} is none of the allowed values"
    if "const" in schema and _canonical(value) != _canonical(schema["const"]):
        yield f"{_shown(value)} is not {_shown(schema['const'])}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _number_problems(value, schema)


def _number_problems(value: float, schema: Mapping[str, Any]) -> Iterator[str]:
    limits = {key: schema[key] for key in _BREAKS if is_number(schema.get(key))}
    for key, limit in limits.items():
        if _BREAKS[key](value, limit):
            yield f"{value} breaks {key} {limit}"
    step = schema.get("multipleOf")
    # Python reads 1e999 as infinity, which is no fraction.
    is_finite = isinstance(value, int) or math.isfinite(value)
    if is_number(step) and step > 0 and is_finite and Fraction(str(value)) % Fraction(str(step)):
        yield f"{value} is no multiple of {step}"


_BREAKS: dict[str, Callable[[float, float], bool]] = {
    "minimum": operator.lt,
    "maximum": operator.gt,
    "exclusiveMinimum": operator.le,
    "exclusiveMaximum": operator.ge,
}


def _count_problems(count: int, schema: Mapping[str, Any], low: str, high: str, things: str) -> Iterator[str]:
    least, most = schema.get(low), schema.get(high)
    if is_count(least) and count < least:
        yield f"{count} {things}, at least {least} are needed"
    if is_count(most) and count > most:
        yield f"{count} {things}, at most {most} are allowed"


def _is_kind(value: Any, kind: Any) -> bool:
    if kind == "integer":
        # An integer may be too large for a float.
        return type_name(value) == "number" and (isinstance(value, int) or value.is_integer())
    return type_name(value) == kind


def _canonical(value: Any) -> str:
    """Text that is equal for equal JSON values: 1.0 is 1, order of keys does not matter."""
    return canonical_json(_plain(value))


def is_equal(value: Any, other: Any) -> bool:
    """Whether two values are the same JSON value."""
    return _canonical(value) == _canonical(other)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if is_list(value):
        return [_plain(item) for item in value]
    if is_object(value):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if is_list(value) else []


def _members(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if is_object(value) else []


def _at(path: str, what: str) -> str:
    return f"{path or 'value'}: {what}"


def _shown(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
