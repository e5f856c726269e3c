"""Counting tokens, and raw completions: exact, and refused where they are not what was asked for."""

from typing import Any

import anyio
import pytest

from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL, WEATHER_TOOL, chat, chat_with_tool, continued, user
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import Script, StubEngine, cut, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258


async def post(gateway: Running, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    """The JSON of an answer, which must have ``status``."""
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_the_count_of_a_conversation_is_the_prompt_of_its_completion(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: says(writer.turn("R", "odd  "), end_of_msg=END_OF_MSG)
    first = chat_with_tool()
    answer = await gateway.ask(first)
    second = continued(first, answer, user("more"))
    del second["messages"][1]["reasoning_content"]
    fields = {key: second[key] for key in ("messages", "tools")}
    counted = await post(gateway, "/v1/tokenize", {**fields, "reasoning_effort": "low"})
    answer = await gateway.ask({**second, "reasoning_effort": "low"})
    assert counted["tokens"] == stub.requests[-1]["input_ids"]
    assert counted["count"] == answer["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert counted["max_model_len"] == 100_000


async def test_text_becomes_ids_and_ids_text(offline: Running, tokenizer: K3Tokenizer) -> None:
    text = "é <|open|>"
    one = await post(offline, "/v1/tokenize", {"model": MODEL, "prompt": text})
    assert one == {"tokens": list(text.encode()), "count": len(text.encode()), "max_model_len": 100_000}
    two = await post(offline, "/v1/tokenize", {"prompt": ["a", "bc"], "add_special_tokens": False})
    assert (two["tokens"], two["count"]) == ([[97], [98, 99]], [1, 2])
    assert await post(offline, "/v1/detokenize", {"tokens": one["tokens"]}) == {"text": text}
    assert await post(offline, "/v1/detokenize", {"tokens": [[97], [END_OF_MSG]]}) == {"text": ["a", "<|end_of_msg|>"]}
    assert await post(offline, "/v1/detokenize", {"tokens": []}) == {"text": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 1}, "prompt"),
        ("tokenize", {"prompt": ["a", 1]}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("tokenize", {"messages": [user("x")], "temperature": 1}, "temperature"),
        ("tokenize", {"messages": [{"role": "odd"}]}, "messages[0].role"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [268]}, "tokens"),
        ("detokenize", {"tokens": [True]}, "tokens"),
        ("detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
        ("completions", {"model": MODEL}, "prompt"),
        ("completions", {"model": MODEL, "prompt": ""}, "prompt"),
        ("completions", {"model": MODEL, "prompt": ["a", "b"]}, "prompt"),
        ("completions", {"model": MODEL, "prompt": [265]}, "prompt"),
        ("completions", {"model": MODEL, "prompt": "x" * 100_000}, "prompt"),
        ("completions", {"model": MODEL, "prompt": "a", "stream": True}, "stream"),
        ("completions", {"model": MODEL, "prompt": "a", "echo": True}, "echo"),
        ("completions", {"model": MODEL, "prompt": "a", "n": 2}, "n"),
        ("completions", {"model": MODEL, "prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"model": MODEL, "prompt": "a", "logprobs": 1}, "logprobs"),
        ("completions", {"model": MODEL, "prompt": "a", "suffix": "b"}, "suffix"),
        ("completions", {"model": MODEL, "prompt": "a", "prompt_cache_key": "b"}, "prompt_cache_key"),
        ("completions", {"model": MODEL, "prompt": "a", "max_completion_tokens": 3}, "max_completion_tokens"),
        ("completions", {"model": MODEL, "prompt": "a", "tools": [WEATHER_TOOL]}, "tools"),
    ],
)
async def test_what_is_not_honoured_is_refused(offline: Running, path: str, body: dict[str, Any], param: str) -> None:
    assert (await post(offline, f"/v1/{path}", body, 400))["error"]["param"] == param


async def test_an_unknown_model_is_not_found(offline: Running) -> None:
    for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": []}), ("completions", {"prompt": "a"})):
        await post(offline, f"/v1/{path}", {**body, "model": "other"}, 404)


async def test_a_completion_ends_where_text_ends(gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
    async def ask(**fields: Any) -> tuple[str, str, int]:
        made = await post(gateway, "/v1/completions", {"model": MODEL, "prompt": "a", **fields})
        choice = made["choices"][0]
        return choice["text"], choice["finish_reason"], made["usage"]["completion_tokens"]

    stub.plan = lambda _: cut(writer.text("one two"))
    assert await ask() == ("one two", "length", 7)
    assert stub.requests[-1]["sampling_params"]["max_new_tokens"] == 16
    assert await ask(stop=" t", max_tokens=30) == ("one", "stop", 5)
    assert stub.requests[-1]["sampling_params"]["max_new_tokens"] == 30
    stub.plan = lambda _: says([*writer.text("one"), 259, *writer.text("two")], end_of_msg=END_OF_MSG)
    assert await ask(prompt=[97, 259]) == ("one", "stop", 4)
    assert stub.requests[-1]["input_ids"] == [97, 259]
    stub.plan = lambda _: Script([], None, status=400, error={"error": {"message": "no"}})
    await post(gateway, "/v1/completions", {"model": MODEL, "prompt": "a"}, 400)


async def test_a_completion_is_aborted_when_its_client_leaves(gateway: Running, stub: StubEngine) -> None:
    stub.plan = lambda _: Script([], None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, gateway, "/v1/completions", {"model": MODEL, "prompt": "a"})
        await stub.until(lambda engine: bool(engine.running))
        tasks.cancel_scope.cancel()
    await stub.until(lambda engine: bool(engine.aborts) and not engine.running)


async def test_ready_and_health_say_whether_the_engine_answers(gateway: Running, stub: StubEngine) -> None:
    for status, ready in ((200, True), (503, False)):
        stub.ready = ready
        assert (await gateway.client.get("/ready")).status_code == status
        assert (await gateway.client.get("/health")).status_code == status
    assert (await gateway.client.post("/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize("fields", [{"metadata": True}, {"prompt_cache_key": 1.5}, {"user": {}}, {"metadata": [[]]}])
async def test_names_of_any_type_are_read_or_refused(offline: Running, fields: dict[str, Any]) -> None:
    answer = await post(offline, "/v1/tokenize", {**chat(), **fields}, 400)
    assert answer["error"]["param"] == next(iter(fields))


async def test_a_count_by_the_messages_api_looks_into_the_session_that_the_extension_names(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    stub.plan = lambda _: says(writer.turn("a long thought", "Hi"), end_of_msg=END_OF_MSG)
    named = {"k3": {"cache": {"session": "mine"}}}
    await gateway.ask({**chat(), **named})
    messages = [*chat()["messages"], {"role": "assistant", "content": "Hi"}, user("more")]
    counted = await post(gateway, "/v1/messages/count_tokens", {"model": MODEL, "messages": messages, **named})
    answer = await gateway.ask({**chat(), **named, "messages": messages})
    assert counted["input_tokens"] == answer["usage"]["prompt_tokens"]
