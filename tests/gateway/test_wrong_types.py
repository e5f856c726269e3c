"""Whatever JSON value stands in whatever place of a request, the answer is an answer or a refusal, never a failure."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.bodies import MODEL, WEATHER_TOOL, chat, user
from tests.gateway.conftest import Running
from tests.gateway.responses_items import FLAT_TOOL
from tests.gateway.stub_engine import StubEngine

Json = dict[str, Any]
Path = tuple[str | int, ...]

WRONG: list[Any] = [None, True, -1, 1e300, "", [], [{}], {}, {"type": []}]

_CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "$defs": {"b": {"type": "null"}}}
CHAT: Json = {
    **chat(),
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "q", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ],
    "tools": [WEATHER_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}},
    "thinking": {"type": "enabled", "keep": "all", "effort": "low"},
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1},
    "stop": ["a"],
    "metadata": {"session_id": "s"},
    "k3": {"cache": {"session": "s", "wait_s": 1}},
}
MESSAGES: Json = {
    "model": MODEL,
    "max_tokens": 50,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        user("q"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "k3.x"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "rain"}],
                    "is_error": False,
                },
                {"type": "text", "text": "go on"},
            ],
        },
    ],
    "tools": [{"name": "get_weather", "description": "d", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5000, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"session_id": "s"}'},
    "stop_sequences": ["a"],
}
RESPONSES: Json = {
    "model": MODEL,
    "instructions": "i",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
            "encrypted_content": "k3.x",
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "t"}],
            "status": "completed",
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ],
    "tools": [FLAT_TOOL, {**FLAT_TOOL, "name": "other"}],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_weather"}],
    },
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA, "strict": True}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"session_id": "s"},
    "previous_response_id": None,
}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/tokenize": {key: CHAT[key] for key in ("model", "messages", "tools", "metadata")},
    "/v1/detokenize": {"model": MODEL, "tokens": [[1, 2]]},
    "/v1/completions": {"model": MODEL, "prompt": [1, 2], "stop": ["a"], "logit_bias": {"5": 1}},
    "/v1/k3/cache/release": {"session": "session:s"},
    "/v1/k3/cache/abandon": {"session": "session:s", "from": 1},
    "/v1/k3/cache/pin": {"seconds": 1, "messages": CHAT["messages"], "tools": [WEATHER_TOOL]},
}


@pytest.fixture
def stub(stub: StubEngine) -> StubEngine:
    """The scripted engine with the checkpoint cache."""
    stub.cache_backend = "k3"
    return stub


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place within a value, containers too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*at, key)
        yield from places(below, (*at, key))


def replaced(body: Json, place: Path, value: Any) -> Json:
    """The body with another value in one place."""
    changed = copy.deepcopy(body)
    owner: Any = changed
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = value
    return changed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", BODIES)
async def test_a_value_of_any_type_in_any_place_fails_nothing(gateway: Running, path: str) -> None:
    refused = 0
    for place in places(BODIES[path]):
        for value in WRONG:
            content = json.dumps(replaced(BODIES[path], place, value)).encode()
            response = await gateway.client.post(path, content=content)
            assert response.status_code < 500, (place, value, response.text)
            if response.status_code >= 400:
                refused += 1
                error = response.json()["error"]
                assert isinstance(error["message"], str) and isinstance(error["type"], str), (place, value)
    assert refused >= len(WRONG) - 1
