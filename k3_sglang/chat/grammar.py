"""What a turn must look like, as a grammar that the engine can hold the model to."""

import json
from dataclasses import dataclass
from typing import Any, TypedDict

from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.grammar_rules import (
    MAX_EXCLUDED_CHARS,
    Rules,
    char_set,
    choice,
    control,
    integers,
    literal,
    repeat,
    words_except,
)
from k3_sglang.chat.grammar_schema import FREE, PRINTABLE, TIGHT, Bounds, Member, SchemaRules
from k3_sglang.chat.grammar_strings import TEXT, CountedLengths, raw_string
from k3_sglang.chat.json_types import is_object
from k3_sglang.chat.schema_keywords import StepBudget
from k3_sglang.chat.tags import MAX_KEY_CHARS
from k3_sglang.chat.types import Channel, ChatRequest, JSONObject, NamedTool

# Places of the markers after the vocabulary's first control token; the same in every K3 vocabulary.
OPEN_OFFSET, CLOSE_OFFSET, SEP_OFFSET = 3, 4, 5
_OPEN, _CLOSE, _SEP = control(OPEN_OFFSET), control(CLOSE_OFFSET), control(SEP_OFFSET)

_MAX_CALLS = 64
# All schemas of a request together; the work is done while the client waits, in well under a second.
_SCHEMA_STEPS = 30_000
_FORCED_TEXT_CHARS = 48
_FORCED_TEXT = ((0x0A, 0x0A), (0x20, 0x7E))
# Keys of undeclared arguments: attribute text that needs no escaping.
_KEY_CHARS = ((0x20, 0x21), (0x23, 0x25), (0x27, 0xD7FF), (0xE000, 0x10FFFF))


class Constraint(TypedDict):
    """Keys to merge into SGLang's sampling parameters."""

    structural_tag: str


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """A grammar for everything that follows the generation prompt, up to `<|end_of_msg|>` exclusive.

    `loosened` names what the schemas demand and the grammar cannot express ("tool.argument: keyword"); such
    values must be validated after decoding.
    """

    ebnf: str
    loosened: tuple[str, ...]

    def constraint(self) -> Constraint:
        """The grammar as sampling parameters."""
        tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": self.ebnf}}
        return {"structural_tag": json.dumps(tag, ensure_ascii=False)}


def constraint(request: ChatRequest, start: Channel, *, force: bool = False) -> Constraint | None:
    """Sampling parameters that hold the turn to its contract; None when the model is free."""
    grammar = turn_grammar(request, start, force=force)
    return None if grammar is None else grammar.constraint()


def turn_grammar(request: ChatRequest, start: Channel, *, force: bool = False) -> TurnGrammar | None:
    """The grammar of a turn that begins inside channel `start`.

    There is one when the request sets a contract: `tool_choice` "required", named or (with tools) "none",
    `response_format`, a tool with `strict`, or tools without `parallel_tool_calls`. Reasoning is left free in all
    of them. With `force` there always is one, and it is short: a whole turn for weights that have not learned any,
    with free text, strings, lists and numbers bounded; a call is made unless `tool_choice` is "none", optional only
    right after tool results.
    Raises ChatRequestError for schemas nested too deeply to be written out.
    """
    builder = _TurnBuilder(request, TIGHT if force else FREE)
    if not force and not builder.is_bound:
        return None
    try:
        return builder.build(start)
    except RecursionError:
        raise ChatRequestError(
            builder.param, "schema_too_deep", "the schema is nested too deeply; flatten it or use $defs"
        ) from None


class _TurnBuilder:
    def __init__(self, request: ChatRequest, bounds: Bounds) -> None:
        self._request = request
        self._bounds = bounds
        self._forced = bounds is TIGHT
        self._rules = Rules()
        self._loosened: list[str] = []
        self._budget = StepBudget(_SCHEMA_STEPS)
        self._lengths = CountedLengths()
        self._tools = _callable_tools(request)
        self.param = "tools"  # the field whose schema is being written

    @property
    def is_bound(self) -> bool:
        """Whether the request sets a contract for the turn."""
        request = self._request
        if request.response_format is not None or self._must_call:
            return True
        if request.tool_choice == "none":
            return bool(request.declared_tools)
        if self._tools and not request.parallel_tool_calls:
            return True
        return any(_function(tool).get("strict") is True for tool in self._tools)

    def build(self, start: Channel) -> TurnGrammar:
        think = f"{self._text(0)} {_close('think')} " if start == "think" else ""
        body = self._response_and_tools(opened=start == "response")
        ebnf = self._rules.text(f"{think}{body} {_close('message')}")
        return TurnGrammar(ebnf, tuple(self._loosened))

    @property
    def _must_call(self) -> bool:
        choice_ = self._request.tool_choice
        return bool(self._tools) and (choice_ == "required" or isinstance(choice_, NamedTool))

    def _response_and_tools(self, *, opened: bool) -> str:
        """Response and tools in their order; which of them may be absent depends on the contract."""
        tools = self._tools_section()
        answer = self._answer(opened=opened)
        if not tools:
            return answer
        wanted = self._request.response_format
        prose = answer
        if wanted is not None:
            # Beside calls the response is empty: the JSON contract is about a final answer.
            prose = _element("response", "", opened=opened)
        leading = prose if opened or self._forced else f"({prose})?"
        with_calls = f"{leading} {tools}"
        if self._must_call or (self._forced and not self._after_results):
            return with_calls
        if wanted is not None:
            return choice((f"{answer} ({tools})?", with_calls))
        return f"{leading} ({tools})?"

    @property
    def _after_results(self) -> bool:
        messages = self._request.messages
        return bool(messages) and messages[-1].role == "tool"

    def _answer(self, *, opened: bool) -> str:
        wanted = self._request.response_format
        if wanted is None:
            return _element("response", self._text(1), opened=opened)
        schema: Any = {"type": "object"} if wanted.schema is None else wanted.schema
        space = self._bounds.space
        self.param = "response_format.json_schema.schema"
        rule = self._schema_rules(schema, "response_format").value(schema)
        return _element("response", f"{space} {rule} {space}", opened=opened)

    def _text(self, least: int) -> str:
        """Free text: any characters, no control tokens."""
        if self._forced:
            return repeat(char_set(_FORCED_TEXT), least, _FORCED_TEXT_CHARS)
        return self._rules.add("text", repeat(char_set(TEXT), 0, None))

    def _tools_section(self) -> str:
        if not self._tools:
            return ""
        one = self._forced or isinstance(self._request.tool_choice, NamedTool) or not self._request.parallel_tool_calls
        bodies = [(_attribute_text(_function(tool)["name"]), self._arguments(tool)) for tool in self._tools]
        calls = self._calls(bodies, literal("1"))
        if not one:
            calls += f" {repeat(self._calls(bodies, integers(2, _MAX_CALLS)), 0, _MAX_CALLS - 1)}"
        return self._rules.add("tools", f"{_open('tools')} {calls} {_close('tools')}")

    def _calls(self, bodies: list[tuple[str, str]], index: str) -> str:
        """One call of any of the tools; `index` is its number's rule."""
        calls = [
            f"{literal(name)} {literal(_quoted_attribute('index'))} {index} {literal(chr(34))} {_SEP} {body}"
            for name, body in bodies
        ]
        begin = f"{_OPEN} {literal('call' + _quoted_attribute('tool'))}"
        return self._rules.add("call", f"{begin} {choice(calls)} {_close('call')}")

    def _arguments(self, tool: JSONObject) -> str:
        """Argument elements of one tool: declared ones in order, then undeclared ones if the schema has any."""
        function = _function(tool)
        schema: JSONObject = function.get("parameters") or {}
        self.param = _param(self._request, tool)
        schemas = self._schema_rules(schema, str(function["name"]))
        objects = [branch for kind, branch in schemas.branches(schema) if kind == "object"]
        if not objects:
            objects = [JSONObject()]
        return choice(self._argument_list(schemas, branch) for branch in objects)

    def _argument_list(self, schemas: SchemaRules, schema: dict[str, Any]) -> str:
        members = self._nameable(schemas.members(schema, nested=False), schemas)
        parts = [self._argument(schemas, member) for member in members]
        allowed = schemas.additional(schema) if schema else None
        open_to_others = allowed is not None and (schema.get("additionalProperties") or not members)
        if open_to_others and any(len(member.name) > MAX_EXCLUDED_CHARS for member in members):
            schemas.loosen(f"undeclared arguments beside a name of more than {MAX_EXCLUDED_CHARS} characters")
        elif allowed is not None and open_to_others:
            key = words_except(self._rules, [_attribute_text(m.name) for m in members], _KEY_CHARS)
            parts.append(f"{self._elements(schemas, key, allowed)}*")
        return " ".join(parts) or '""'

    def _nameable(self, members: list[Member], schemas: SchemaRules) -> list[Member]:
        """The members whose names a tag can hold; a request refuses others only where it declares them directly."""
        short = [member for member in members if len(member.name) <= MAX_KEY_CHARS]
        if len(short) < len(members):
            schemas.loosen(f"a property name of more than {MAX_KEY_CHARS} characters")
        return short

    def _argument(self, schemas: SchemaRules, member: Member) -> str:
        element = self._elements(schemas, literal(_attribute_text(member.name)), member.schema)
        return element if member.required else f"{element}?"

    def _elements(self, schemas: SchemaRules, key: str, schema: Any) -> str:
        """One argument element; its `type` attribute and its value go together."""
        values: dict[str, list[str]] = {}
        for kind, branch in schemas.branches(schema):
            value = self._raw_string(schemas, branch) if kind == "string" else schemas.of_type(kind, branch)
            values.setdefault(kind, []).append(value)
        typed = [f"{literal(kind + chr(34))} {_SEP} {choice(dict.fromkeys(parts))}" for kind, parts in values.items()]
        begin = f"{_OPEN} {literal('argument' + _quoted_attribute('key'))} {key} {literal(_quoted_attribute('type'))}"
        return self._rules.add("argument", f"{begin} {choice(typed)} {_close('argument')}")

    def _raw_string(self, schemas: SchemaRules, schema: dict[str, Any]) -> str:
        if "const" in schema:
            return literal(schema["const"])
        low, high = schemas.lengths(schema)
        if not self._forced:
            return raw_string(self._rules, low, high)
        return self._rules.add("raw", repeat(char_set(PRINTABLE), low, high))

    def _schema_rules(self, schema: Any, path: str) -> SchemaRules:
        return SchemaRules(self._rules, schema, self._bounds, path, self._loosened, self._budget, self._lengths)


def _callable_tools(request: ChatRequest) -> list[JSONObject]:
    """Tools that the turn may call."""
    if not request.tools_callable:
        return []
    wanted = request.tool_choice
    if isinstance(wanted, NamedTool):
        return [tool for tool in request.declared_tools if _function(tool).get("name") == wanted.name]
    return list(request.declared_tools)


def _param(request: ChatRequest, tool: JSONObject) -> str:
    """Path of a tool's schema; messages that declare tools keep no path, so for theirs the tool is named."""
    places = [place for place, other in enumerate(request.tools) if other is tool]
    return f"tools[{places[0]}].function.parameters" if places else f"messages, tool {_function(tool)['name']}"


def _function(tool: JSONObject) -> JSONObject:
    function = tool.get("function")
    return function if is_object(function) else {}


def _element(name: str, body: str, *, opened: bool = False) -> str:
    return f"{'' if opened else _open(name) + ' '}{body} {_close(name)}"


def _open(name: str) -> str:
    return f"{_OPEN} {literal(name)} {_SEP}"


def _close(name: str) -> str:
    return f"{_CLOSE} {literal(name)} {_SEP}"


def _quoted_attribute(name: str) -> str:
    """What stands between the previous attribute's closing quote, if any, and the value."""
    return f'" {name}="' if name in ("index", "type") else f' {name}="'


def _attribute_text(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")
