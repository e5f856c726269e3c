"""One session on the real engine, driven in turn by chat completions, responses and messages; the SDKs through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.engine.stack import Engine, Stack
from tests.gateway.test_three_protocols import FLAT_TOOL, NEUTRAL_TOOL, PROTOCOLS, Json

LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
MAX_TOKENS = 400
"""More than the longest turn the forced grammar allows."""
SHARED = 150
"""Fewer tokens than the tool and the first message have."""


@pytest.fixture
def gateway(stack: Stack, engine: Engine) -> Iterator[httpx.Client]:
    """The session's gateway, over an engine with an empty prefix cache."""
    with httpx.Client(base_url=stack.gateway_url, timeout=120, trust_env=False) as client:
        yield client


def counts(usage: Json) -> tuple[int, int]:
    """Prompt tokens and the cached ones among them, whatever the protocol calls them."""
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return cached + usage["cache_creation_input_tokens"] + usage["input_tokens"], cached
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def test_a_session_through_three_protocols_is_one_prefix(gateway: httpx.Client) -> None:
    history: list[Json] = [{"role": "user", "content": "Weather in Oslo?"}]
    before = 0
    for turn in range(6):
        name = list(PROTOCOLS)[turn % 3]
        path, request, turn_of = PROTOCOLS[name]
        body = {**request(history), "model": "tiny", "temperature": 0, LIMITS[name]: MAX_TOKENS}
        answer = gateway.post(path, json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        verdict = answer.headers["x-k3-replay"]
        assert verdict.startswith("exact; " if turn else "new; "), (name, verdict)
        prompt_tokens, cached_tokens = counts(answer.json()["usage"])
        # All of the prompt before was computed, whichever protocol asked for it.
        assert before <= cached_tokens < prompt_tokens or turn == 0, (name, before, cached_tokens)
        before = prompt_tokens
        said = turn_of(answer.json())
        calls = said.get("tool_calls", [])
        history += [said, *({"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls)]
        if not calls:
            history.append({"role": "user", "content": f"and {turn}?"})


def test_the_openai_package_streams_responses_with_tools(stack: Stack, engine: Engine) -> None:
    with openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="unused", max_retries=0) as client:
        tools: Any = [FLAT_TOOL]
        kinds: list[str] = []
        with client.responses.stream(
            model="tiny", input="weather?", tools=tools, tool_choice="required", max_output_tokens=MAX_TOKENS
        ) as stream:
            kinds += [event.type for event in stream]
            final = stream.get_final_response()
        called = [item for item in final.output if item.type == "function_call"]
        assert final.status == "completed" and called[0].name == FLAT_TOOL["name"]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        results: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in called]
        follow = client.responses.create(
            model="tiny", input=results, previous_response_id=final.id, tools=tools, max_output_tokens=MAX_TOKENS
        )
        # What the tool choice added behind the history was for one turn; all before it is there.
        assert follow.usage is not None and follow.usage.input_tokens_details.cached_tokens > SHARED


def test_the_anthropic_package_streams_messages_with_tools(stack: Stack, engine: Engine) -> None:
    with anthropic.Anthropic(base_url=stack.gateway_url, api_key="unused", max_retries=0) as client:
        tools: Any = [NEUTRAL_TOOL]
        messages: Any = [{"role": "user", "content": "weather?"}]
        with client.messages.stream(
            model="tiny", max_tokens=MAX_TOKENS, messages=messages, tools=tools, tool_choice={"type": "any"}
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use" and kinds[0] == "message_start" and kinds[-1] == "message_stop"
        uses = [block for block in final.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"} for use in uses]
        messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
        follow = client.messages.create(model="tiny", max_tokens=MAX_TOKENS, messages=messages, tools=tools)
        assert (follow.usage.cache_read_input_tokens or 0) > SHARED
