"""Random walks through turn grammars: what comes out is a valid turn, and it ends."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from k3_sglang.chat.grammar import constraint, turn_grammar
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.types import ChatRequest
from tests.chat.grammar_engine import Engine
from tests.chat.grammar_turns import DEFS, REQUIRED, SCHEMAS, TOOLS, USER, asks, call, tool_of, turn

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with the serve extra")


def forced_requests() -> Iterator[dict[str, Any]]:
    schemas = [case["schema"] for case in SCHEMAS if isinstance(case["schema"], dict)]
    yield asks()
    yield asks(tools=TOOLS)
    yield {"messages": [USER, {"role": "tool", "name": "now", "content": "x"}], "tools": TOOLS}
    yield asks(tools=TOOLS, tool_choice="none", thinking=False)
    yield asks(tools=TOOLS, response_format={"type": "json_object"})
    for schema in schemas:
        yield asks(tools=[tool_of(schema), tool_of(schema, required=False) | {"function": {"name": "g"}}])
        wanted = {**schema, "$defs": DEFS}
        yield asks(response_format={"type": "json_schema", "json_schema": {"schema": wanted}}, thinking=False)


class TestForcedTurns:
    """Untrained weights, held to whole turns."""

    @pytest.mark.parametrize("request_", list(forced_requests()), ids=lambda request: "")
    def test_random_walks_are_short_valid_turns(self, engine: Engine, request_: dict[str, Any]) -> None:
        parsed = parse_request(request_)
        grammar = turn_grammar(parsed, parsed.start, force=True)
        assert grammar is not None
        drawn = random.Random(json.dumps(request_))
        for _ in range(4):
            ids = engine.walk(engine.matcher(parsed, force=True), drawn, limit=600)
            parser = TurnParser(engine.tokenizer, start=parsed.start)
            parser.feed(ids)
            assert parser.done
            spoken = parser.turn
            assert (spoken.finished, spoken.warnings) == (True, ()), engine.tokenizer.decode(ids)
            self.check_calls(parsed, spoken.calls)
            if parsed.response_format is not None and not spoken.calls:
                jsonschema.validate(json.loads(spoken.content), parsed.response_format.schema or {"type": "object"})
            elif parsed.response_format is None:
                assert spoken.content

    def check_calls(self, request: ChatRequest, calls: Any) -> None:
        schemas = {t["function"]["name"]: t["function"].get("parameters") or {} for t in request.declared_tools}
        must_call = bool(schemas) and request.tool_choice != "none" and request.messages[-1].role != "tool"
        assert len(calls) == 1 if must_call else len(calls) <= 1
        for made in calls:
            assert made.complete
            jsonschema.validate(json.loads(made.arguments), schemas[made.name])

    def test_after_tool_results_a_call_is_optional(self, engine: Engine) -> None:
        request = {"messages": [USER, {"role": "tool", "name": "now", "content": "x"}], "tools": TOOLS}
        assert engine.accepts(engine.matcher(request, force=True), "a" + turn(response="x"))
        assert engine.accepts(engine.matcher(request, force=True), "a" + turn(call("now"), response="x"))

    def test_strings_come_from_their_enum_and_have_no_free_white_space(self, engine: Engine) -> None:
        request = asks(tools=[tool_of({"enum": ["c", "f"]})])
        drawn = random.Random(0)
        values: set[str] = set()
        for _ in range(20):
            text = engine.tokenizer.decode(engine.walk(engine.matcher(request, force=True), drawn, limit=300))
            values.add(text.split('type="string"<|sep|>')[1].split("<|close|>")[0])
        assert values == {"c", "f"}


class TestUnconstrainedLengths:
    def test_a_walk_that_wants_to_end_ends(self, engine: Engine) -> None:
        """Random text, but structure whenever the grammar allows some: contracts are met without detours."""
        special = engine.tokenizer.is_special
        for fields in (REQUIRED, asks(response_format={"type": "json_object"}), asks(tools=TOOLS, tool_choice="none")):
            matcher = engine.matcher(fields)
            drawn = random.Random(1)
            ids: list[int] = []
            while not matcher.is_terminated():
                allowed = engine.allowed(matcher)
                eager = [token for token in allowed if special(token) or bytes([token % 256]) in b'}"']
                ids.append(drawn.choice(eager or allowed))
                assert matcher.accept_token(ids[-1])
                assert len(ids) < 2000


def test_one_compiler_serves_many_grammars_with_the_masks_of_a_fresh_one(engine: Engine) -> None:
    """xgrammar's compile cache confuses grammars that differ in token elements only; ours have none."""
    drawn = random.Random(2)
    for request in list(forced_requests())[::3]:
        for force in (True, False):
            parsed = parse_request(request)
            if constraint(parsed, parsed.start, force=force) is None:
                continue
            shared, fresh = engine.matcher(parsed, force=force), Engine(engine.tokenizer).matcher(parsed, force=force)
            for _ in range(60):
                allowed = engine.allowed(fresh)
                assert engine.allowed(shared) == allowed
                structure = [token for token in allowed if engine.tokenizer.is_special(token)]
                token = drawn.choice(structure or allowed)
                assert shared.accept_token(token) and fresh.accept_token(token)
                if fresh.is_terminated():
                    break
