"""Constrained generations of the tiny model: how many break the contract of their request? None may; exit code 1 then.

python -m k3_sglang.launch --model tiny-random --served-name tiny --engine-port 30001 &
python benchmarks/constrained.py --engine-url http://127.0.0.1:30001 --gateway-url http://127.0.0.1:30000

Two ways, through the engine's real grammar backend, with random weights sampled at temperature 1:

- gateway: chat completions; the server holds untrained weights to whole, short turns (`constrained_by_default`).
- free: the grammar that a trained model gets, straight to the engine. Random weights would go on for ever inside free
  text, so the tokens that end things have a bias; what is allowed is the grammar's decision alone.

Results are judged by the jsonschema package. A turn cut by the token limit has promised nothing and is counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
from rich.console import Console
from rich.table import Table

from k3_sglang.chat.encode import encode
from k3_sglang.chat.grammar import turn_grammar
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.tiny.checkpoint import ensure

CONCURRENT = 8
MAX_TOKENS = 400
CLOSE_BIAS, OPEN_BIAS, CLOSING_TEXT_BIAS = 12.0, 11.0, 6.0
"""Added to the logits of `<|close|>`, `<|open|>`, and of the characters that close JSON, under free grammars."""

Body = dict[str, Any]


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """A function tool."""
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": {**parameters, **more}, "strict": True}}


DAYS = {"type": "integer", "minimum": 1, "maximum": 14}
TOOLS = [
    tool("get_weather", {"city": {"type": "string"}, "days": DAYS}, ["city"]),
    tool("set_mode", {"模式": {"enum": ["快", "slow", 3, None]}, "on": {"type": "boolean"}}, ["模式", "on"]),
    tool(
        "plan",
        {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "minItems": 1, "maxItems": 2}},
        ["steps"],
        **{
            "$defs": {
                "step": {
                    "type": "object",
                    "properties": {"do": {"enum": ["a", "b"]}, "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
                    "required": ["do", "n"],
                    "additionalProperties": False,
                }
            }
        },
    ),
    tool("now", {}),
]
NEXT = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
ANSWER = {
    "type": "object",
    "properties": {
        "名": {"type": "string", "maxLength": 8},
        "score": {"type": "integer", "minimum": -5, "maximum": 5},
        "tags": {"type": "array", "items": {"enum": ["x", "y", "é"]}, "maxItems": 2},
        "next": {"anyOf": [NEXT, {"type": "null"}]},
    },
    "required": ["名", "score", "next"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}

MODES: dict[str, Callable[[int], Body]] = {
    "tool_choice required": lambda n: {"tools": TOOLS, "tool_choice": "required"},
    "tool_choice named": lambda n: {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": TOOLS[n % len(TOOLS)]["function"]["name"]}},
    },
    "auto, strict tools": lambda n: {"tools": TOOLS},
    "json_schema": lambda n: {"response_format": FORMAT},
    "json_object": lambda n: {"response_format": {"type": "json_object"}},
    "parallel_tool_calls off": lambda n: {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
}


@dataclass(frozen=True)
class Result:
    """One generated turn: its calls as (name, arguments text), and why it ended."""

    content: str
    calls: tuple[tuple[str, str], ...]
    finish: str


def body_of(mode: str, number: int) -> Body:
    """Request `number` of a mode; thinking is off in every third."""
    thinking = {"thinking": False} if number % 3 == 2 else {}
    return {"messages": [{"role": "user", "content": f"Request {number}."}], **MODES[mode](number), **thinking}


def fault(body: Body, result: Result) -> str | None:
    """What breaks the contract of a request that was not cut; None if nothing does."""
    schemas = {entry["function"]["name"]: entry["function"]["parameters"] for entry in body.get("tools", ())}
    choice = body.get("tool_choice")
    if choice is not None and not result.calls:
        return "no call"
    if isinstance(choice, dict) and [name for name, _ in result.calls] != [choice["function"]["name"]]:
        return f"not exactly one call of {choice['function']['name']}: {result.calls}"
    if body.get("parallel_tool_calls") is False and len(result.calls) > 1:
        return f"{len(result.calls)} calls"
    wanted = body.get("response_format")
    values = [(arguments, schemas.get(name, False)) for name, arguments in result.calls]
    if wanted is not None:
        values.append((result.content, ANSWER if wanted["type"] == "json_schema" else {"type": "object"}))
    for text, schema in values:
        try:
            jsonschema.validate(json.loads(text), schema)
        except ValueError:
            return f"not JSON: {text[:200]!r}"
        except jsonschema.ValidationError as error:
            return f"{error.message[:200]} in {text[:200]}"
    return None


def through_gateway(gateway: httpx.Client, body: Body, number: int) -> Result:
    """A chat completion."""
    request = {**body, "model": "tiny", "temperature": 1.0, "max_tokens": MAX_TOKENS}
    answer = gateway.post("/v1/chat/completions", json=request).raise_for_status().json()
    choice = answer["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    made = tuple((call["name"], call["arguments"]) for call in calls)
    return Result(choice["message"]["content"] or "", made, choice["finish_reason"])


def freely(engine: httpx.Client, tokenizer: K3Tokenizer, body: Body, number: int) -> Result:
    """A turn under the grammar for trained weights, parsed from its ids."""
    request = parse_request(body)
    grammar = turn_grammar(request, request.start)
    assert grammar is not None and grammar.loosened == (), (body, grammar)
    prompt = encode(request, tokenizer)
    biases = {tokenizer.special.close: CLOSE_BIAS, tokenizer.special.open: OPEN_BIAS}
    biases |= {tokenizer.encode_text(char)[0]: CLOSING_TEXT_BIAS for char in '"}]'}
    sampling = {
        "temperature": 1.0,
        "max_new_tokens": MAX_TOKENS,
        "stop_token_ids": [tokenizer.special.end_of_msg],
        "skip_special_tokens": False,
        "logit_bias": {str(token): bias for token, bias in biases.items()},
        **grammar.constraint(),
    }
    answer = engine.post("/generate", json={"input_ids": list(prompt.ids), "sampling_params": sampling})
    generated = answer.raise_for_status().json()
    finish = generated["meta_info"]["finish_reason"]["type"]
    parser = TurnParser(tokenizer, start=prompt.start, calls_allowed=request.tools_callable)
    parser.feed(generated["output_ids"])
    parser.finish("stop" if finish == "stop" else "length")
    turn = parser.turn
    assert finish != "stop" or turn.warnings == (), (turn.warnings, tokenizer.decode(generated["output_ids"]))
    return Result(turn.content, tuple((call.name, call.arguments) for call in turn.calls), finish)


def count(mode: str, generations: int, generate: Callable[[Body, int], Result]) -> tuple[Counter[str], list[str]]:
    """Outcomes of a mode (`valid`, `invalid`, `cut`, and how many `calls`), and the faults."""
    start = random.randrange(1_000_000)
    bodies = [(body_of(mode, number), number) for number in range(start, start + generations)]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        results = list(pool.map(lambda job: generate(*job), bodies))
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for (body, _), result in zip(bodies, results, strict=True):
        found = None if result.finish == "length" else fault(body, result)
        faults += [found] if found else []
        counts["cut" if result.finish == "length" else "invalid" if found else "valid"] += 1
        counts["calls"] += len(result.calls)
    return counts, faults


def main() -> int:
    """Run all modes both ways and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-url", required=True, help="address of SGLang's own server")
    parser.add_argument("--gateway-url", required=True, help="address of the gateway in front of it")
    parser.add_argument("--count", type=int, default=200, help="generations per mode and way (default: 200)")
    arguments = parser.parse_args()
    tokenizer = K3Tokenizer.from_dir(ensure())
    table = Table(title=f"{arguments.count} generations per mode and way")
    for column in ("mode", "way", "valid", "invalid", "cut", "calls"):
        table.add_column(column, justify="left" if column in ("mode", "way") else "right")
    faults: list[str] = []
    with (
        httpx.Client(base_url=arguments.engine_url, timeout=600, trust_env=False) as engine,
        httpx.Client(base_url=arguments.gateway_url, timeout=600, trust_env=False) as gateway,
    ):
        ways: dict[str, Callable[[Body, int], Result]] = {
            "gateway": lambda body, number: through_gateway(gateway, body, number),
            "free": lambda body, number: freely(engine, tokenizer, body, number),
        }
        for mode in MODES:
            for way, generate in ways.items():
                counts, found = count(mode, arguments.count, generate)
                faults += [f"{mode}, {way}: {what}" for what in found]
                table.add_row(mode, way, *(str(counts[key]) for key in ("valid", "invalid", "cut", "calls")))
    Console().print(table)
    for what in faults:
        print(what)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
