"""One completion, not streamed: its shape, its counts and what reaches the engine."""

from typing import Any

import pytest

from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import chat, chat_with_tool
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

OSLO = (("city", "string", "Oslo"), ("days", "number", "3"))


@pytest.fixture
def answers(stub: StubEngine, tokenizer: K3Tokenizer):
    """Make the engine generate given ids."""

    def use(ids: list[int], **options: Any) -> None:
        stub.plan = lambda body: says(ids, end_of_msg=tokenizer.special.end_of_msg, **options)

    return use


async def test_an_answer_has_reasoning_content_and_a_stop_reason(gateway: Running) -> None:
    answer = await gateway.ask(chat())
    choice = answer["choices"][0]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "reasoning_content": "T", "content": "Hi"},
        "finish_reason": "stop",
    }
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "kimi-k3"
    assert answer["id"].startswith("chatcmpl-")


async def test_the_engine_gets_exactly_the_encoded_prompt_as_ids(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    body = chat_with_tool("<|open|> is text", reasoning_effort="low")
    await gateway.ask(body)
    prompt = encode(parse_request({k: body[k] for k in ("messages", "tools", "reasoning_effort")}), tokenizer)
    assert stub.requests[0]["input_ids"] == list(prompt.ids)


async def test_usage_counts_ids_exactly(gateway: Running, stub: StubEngine, writer: TurnWriter, answers: Any) -> None:
    ids = writer.turn("Thinking", "Hi")
    answers(ids, cached_tokens=7)
    usage = (await gateway.ask(chat()))["usage"]
    prompt_tokens = len(stub.requests[0]["input_ids"])
    assert usage == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "total_tokens": prompt_tokens + len(ids),
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": len("Thinking")},
    }


async def test_tool_calls_are_delivered_with_parsed_arguments_and_unguessable_ids(
    gateway: Running, writer: TurnWriter, answers: Any
) -> None:
    answers(writer.turn("T", "", (("get_weather", OSLO), ("get_weather", OSLO[:1]))))
    choice = (await gateway.ask(chat_with_tool()))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 3}'}
    assert first["type"] == "function"
    assert second["function"]["arguments"] == '{"city": "Oslo"}'
    assert first["id"] != second["id"] and len(first["id"]) == len("call_") + 24


async def test_a_call_cut_by_the_budget_is_not_delivered_and_is_named(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    whole = writer.turn("T", "", (("get_weather", OSLO), ("get_weather", OSLO)))
    stub.plan = lambda body: cut(whole[:-30])
    choice = (await gateway.ask(chat_with_tool()))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1
    (lost,) = choice["k3"]["incomplete_tool_calls"]
    assert (lost["index"], lost["name"]) == (1, "get_weather")


async def test_reasoning_cut_by_the_budget_stays_reasoning(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda body: cut(writer.text("We need to count"))
    choice = (await gateway.ask(chat(max_tokens=16)))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {
        "role": "assistant",
        "reasoning_content": "We need to count",
        "content": "",
    }


@pytest.mark.parametrize("fields", [{}, {"tools": chat_with_tool()["tools"], "tool_choice": "none"}])
async def test_calls_that_were_not_allowed_never_reach_the_client(
    gateway: Running, writer: TurnWriter, answers: Any, fields: dict[str, Any]
) -> None:
    answers(writer.turn("T", "Sure.", (("get_weather", OSLO),)))
    choice = (await gateway.ask(chat(**fields)))["choices"][0]
    assert choice["message"] == {"role": "assistant", "reasoning_content": "T", "content": "Sure."}
    assert choice["finish_reason"] == "stop"
    assert "calls_not_allowed" in choice["k3"]["warnings"]


async def test_without_thinking_everything_is_content(gateway: Running, writer: TurnWriter, answers: Any) -> None:
    answers(writer.turn(None, "Plain"))
    answer = await gateway.ask(chat(thinking={"type": "disabled"}))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Plain"}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_the_stop_id_may_be_missing_from_the_engines_ids(
    gateway: Running, writer: TurnWriter, answers: Any
) -> None:
    answers(writer.turn("T", "Hi")[:-1])
    answer = await gateway.ask(chat())
    assert answer["choices"][0]["message"]["content"] == "Hi"
    assert answer["usage"]["completion_tokens"] == len(writer.turn("T", "Hi"))


async def test_several_choices_run_as_separate_requests_and_are_counted_together(
    gateway: Running, stub: StubEngine, writer: TurnWriter, tokenizer: K3Tokenizer
) -> None:
    def plan(body: dict[str, Any]) -> Script:
        return says(writer.turn("T", f"Answer {len(stub.requests)}"), end_of_msg=tokenizer.special.end_of_msg)

    stub.plan = plan
    answer = await gateway.ask(chat(n=3))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {f"Answer {i}" for i in (1, 2, 3)}
    assert answer["usage"]["completion_tokens"] == 3 * len(writer.turn("T", "Answer 1"))
    assert len({request["rid"] for request in stub.requests}) == 3


async def test_a_control_token_without_a_place_ends_the_generation(
    gateway: Running, stub: StubEngine, writer: TurnWriter, tokenizer: K3Tokenizer
) -> None:
    ids = [*writer.turn("T", "Hi", end=False), tokenizer.special.bos, *writer.text("never seen")]
    stub.plan = lambda body: Script([ids], None)
    choice = (await gateway.ask(chat()))["choices"][0]
    assert choice["message"]["content"] == "Hi"
    assert choice["finish_reason"] == "stop"
    assert stub.aborts == [stub.requests[0]["rid"]]


async def test_what_sglangs_router_adds_is_taken_with_its_defaults_only(gateway: Running) -> None:
    off = {"no_stop_trim": False, "ignore_eos": False, "continue_final_message": False, "return_hidden_states": False}
    on = {"skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True}
    await gateway.ask({**chat(logprobs=False), **off, **on})
    refused = await gateway.ask(chat(ignore_eos=True), status=400)
    assert refused["error"]["param"] == "ignore_eos" and "leave it out" in refused["error"]["message"]
