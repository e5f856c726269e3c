"""The client gathers a streamed answer into one turn and names every way an endpoint can fail."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted_endpoint import Reply, call, says, serve, usage

from agent_runtime.conversation import AssistantTurn, CallDelta, ContentDelta, Delta, Message, ReasoningDelta, ToolCall
from agent_runtime.engine.chat_errors import (
    ChatError,
    ChatProtocolError,
    ContextOverflow,
    EndpointFailed,
    EndpointUnreachable,
    RequestRefused,
    StreamBroken,
)
from agent_runtime.engine.openai_chat import ChatClient, ChatSettings, ChatTimeouts

HELLO = [Message(role="user", content="hello")]
QUICK = ChatTimeouts(idle_s=0.3, after_finish_s=0.2, backoff_s=0.01)


async def ask(*script: Reply, timeouts: ChatTimeouts = QUICK, deltas: list[Delta] | None = None) -> AssistantTurn:
    seen: list[Delta] = [] if deltas is None else deltas
    with serve(*script) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=timeouts) as client:
            return await client.complete(HELLO, on_delta=seen.append)


def piece(
    index: int, *, id: str | None = None, name: str | None = None, arguments: str | None = None
) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": index, "function": {}}
    if id is not None:
        entry |= {"id": id, "type": "function"}
    if name is not None:
        entry["function"]["name"] = name
    if arguments is not None:
        entry["function"]["arguments"] = arguments
    return {"tool_calls": [entry]}


async def test_thinking_text_and_usage_are_gathered() -> None:
    deltas: list[Delta] = []
    reply = Reply(
        [{"reasoning_content": "let me "}, {"reasoning_content": "see"}, {"content": "Hel"}, {"content": "lo"}],
        usage=usage(120, 7, 100),
    )
    turn = await ask(reply, deltas=deltas)
    assert (turn.reasoning, turn.content, turn.tool_calls) == ("let me see", "Hello", ())
    assert turn.finish_reason == "stop"
    assert turn.usage is not None
    assert (turn.usage.prompt_tokens, turn.usage.cached_tokens, turn.usage.extend_tokens) == (120, 100, 20)
    assert turn.ttft_s is not None and 0 < turn.ttft_s <= turn.duration_s
    assert deltas == [ReasoningDelta("let me "), ReasoningDelta("see"), ContentDelta("Hel"), ContentDelta("lo")]


async def test_case16_names_and_arguments_split_over_interleaved_deltas_are_put_together_by_index() -> None:
    deltas: list[Delta] = []
    reply = Reply(
        [
            piece(1, id="b", name="brow"),
            piece(0, id="a", name="get_wea"),
            piece(0, name="ther", arguments='{"ci'),
            piece(1, name="ser_open", arguments=""),
            piece(0, arguments='ty": "Ro'),
            piece(1, arguments='{"url": "x"}'),
            piece(0, arguments='me"}'),
        ],
        "tool_calls",
    )
    turn = await ask(reply, deltas=deltas)
    assert turn.tool_calls == (
        ToolCall("a", "get_weather", '{"city": "Rome"}'),
        ToolCall("b", "browser_open", '{"url": "x"}'),
    )
    assert deltas[-1] == CallDelta(0, "get_weather", 16)


async def test_a_character_cut_into_utf16_halves_is_whole_again_and_a_lone_half_is_replaced() -> None:
    """Servers that count in UTF-16 do that; a text with a lone half could never be sent back."""
    halves = [
        {"content": "a\ud83d"},
        {"content": "\ude42b\ud83d"},
        piece(0, id="a", name="f", arguments='{"x": "\ude42"}'),
    ]
    turn = await ask(Reply(halves, "tool_calls"))
    assert turn.content == "a🙂b\ufffd"
    assert turn.tool_calls[0].arguments == '{"x": "\ufffd"}'


async def test_a_call_without_an_id_gets_one() -> None:
    turn = await ask(Reply([piece(0, name="f", arguments="{}")], "tool_calls"))
    assert turn.tool_calls[0].id.startswith("call_")


async def test_a_call_cut_before_its_name_is_dropped() -> None:
    turn = await ask(Reply([piece(0, name="f", arguments="{}"), piece(1, id="b")], "length"))
    assert [call.name for call in turn.tool_calls] == ["f"] and turn.finish_reason == "length"


async def test_b52_thinking_in_the_newer_dialect_is_not_lost() -> None:
    assert (await ask(Reply([{"reasoning": "hm"}, {"content": "x"}]))).reasoning == "hm"


async def test_the_last_finish_reason_wins_and_missing_counts_stay_unknown() -> None:
    turn = await ask(Reply(raw=event('{"content":"x"}', '"tool_calls"'), finish="stop", usage=usage(5, 1)))
    assert turn.finish_reason == "stop"
    assert turn.usage is not None and turn.usage.cached_tokens is None and turn.usage.extend_tokens is None
    assert (await ask(Reply([{"content": "x"}]))).usage is None


def event(delta: str, finish: str = "null", index: int = 0) -> str:
    choice = f'{{"index":{index},"delta":{delta},"finish_reason":{finish}}}'
    return f'data: {{"id":"x","object":"chat.completion.chunk","created":0,"model":"m","choices":[{choice}]}}\n\n'


async def test_an_empty_answer_has_no_first_token_and_is_marked() -> None:
    turn = await ask(Reply())
    assert turn.empty and turn.ttft_s is None


async def test_the_request_carries_history_tools_and_settings_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    settings = ChatSettings("k3", 50, temperature=0.0, top_p=0.9, reasoning_effort="low")
    with serve(says("hi")) as endpoint:
        async with ChatClient(endpoint.base_url, settings=settings) as client:
            await client.complete(HELLO, tools)
            await client.complete(HELLO)
    full, plain = endpoint.requests
    assert full == {
        "model": "k3",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": tools,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 50,
        "temperature": 0.0,
        "top_p": 0.9,
        "reasoning_effort": "low",
    }
    assert "tools" not in plain


async def test_without_a_model_name_the_first_served_model_is_asked_for() -> None:
    with serve(says("hi")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            await client.complete(HELLO)
    assert endpoint.requests[0]["model"] == "scripted"


async def test_nobody_at_the_address_is_an_error_with_a_remedy(free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    async with ChatClient(url, timeouts=QUICK) as client:
        with pytest.raises(EndpointUnreachable, match=r"nothing answers at .* \(3 tries: .*start a server there"):
            await client.complete(HELLO)


def refusal(status: int, code: str | None = None) -> Reply:
    error = {"message": "the words", "type": "t", "param": "messages", "code": code}
    return Reply(status=status, body={"error": error})


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (refusal(400), RequestRefused, "answered 400: the words"),
        (refusal(400, "context_length_exceeded"), ContextOverflow, "answered 400: the words"),
        (refusal(404), RequestRefused, "answered 404: the words"),
        (refusal(429), EndpointFailed, "answered 429: the words"),
        (refusal(408), EndpointFailed, "answered 408: the words"),
        (refusal(500), EndpointFailed, "answered 500: the words"),
        (refusal(503), EndpointFailed, "answered 503: the words"),
        (Reply(status=400, body={"message": "flat"}), RequestRefused, "flat"),
        (Reply(status=400, body=None), RequestRefused, "answered 400: null"),
    ],
    ids=lambda value: str(getattr(value, "status", "")),
)
async def test_an_error_status_becomes_a_typed_error_with_the_servers_words(
    reply: Reply, kind: type[ChatError], words: str
) -> None:
    with serve(reply) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=QUICK) as client:
            with pytest.raises(kind, match=words) as caught:
                await client.complete(HELLO)
    assert type(caught.value) is kind
    assert len(endpoint.requests) == 1, "a request that reached the endpoint is never repeated"


@pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("0.5", 0.5), ("soon", None), ("-1", None), ("inf", None)])
async def test_how_long_a_busy_endpoint_asks_to_wait_is_kept(said: str, seconds: float | None) -> None:
    busy = Reply(status=429, body={"error": {"message": "busy"}}, headers={"retry-after": said})
    with serve(busy) as endpoint:
        async with ChatClient(endpoint.base_url, timeouts=QUICK) as client:
            with pytest.raises(EndpointFailed) as caught:
                await client.complete(HELLO)
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply([{"reasoning_content": "thi"}, call("f", '{"a')], None, end="hang"), "no data for 0.3 s"),
        (Reply([{"reasoning_content": "thi"}, call("f", '{"a')], None, end="close"), "the stream failed"),
        (Reply([{"reasoning_content": "thi"}, call("f", '{"a')], None), "ended in the middle of an answer"),
    ],
    ids=["silence", "dropped", "no-finish"],
)
async def test_an_answer_that_breaks_off_is_an_error_that_keeps_what_had_arrived(reply: Reply, words: str) -> None:
    with pytest.raises(StreamBroken, match=words) as caught:
        await ask(reply)
    partial = caught.value.partial
    assert partial.reasoning == "thi" and partial.tool_calls == (ToolCall("c0", "f", '{"a'),)


@pytest.mark.parametrize("end", ["hang", "close"])
async def test_after_the_finish_reason_a_stream_that_breaks_off_has_lost_nothing(end: Any) -> None:
    turn = await ask(Reply([{"content": "whole"}], end=end))
    assert turn.content == "whole" and turn.finish_reason == "stop"


async def test_a_server_that_forgets_to_end_the_stream_is_not_waited_for() -> None:
    patient = ChatTimeouts(idle_s=60, after_finish_s=0.05)
    turn = await ask(Reply([{"content": "whole"}], usage=usage(5, 1), end="hang"), timeouts=patient)
    assert turn.content == "whole" and turn.usage is not None and turn.duration_s < 30


async def test_keep_alive_comments_hold_a_silent_stream_open() -> None:
    turn = await ask(Reply([{"content": "x"}], comments=10))
    assert turn.content == "x" and turn.ttft_s is not None and turn.ttft_s > QUICK.idle_s


async def test_an_error_event_in_the_stream_is_reported() -> None:
    raw = event('{"content":"x"}') + 'data: {"error": {"message": "engine died", "type": "server_error"}}\n\n'
    with pytest.raises(StreamBroken, match="engine died"):
        await ask(Reply(raw=raw))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("data: {not json\n\n", "not valid"),
        (event("{}", '"exploded"'), "finish_reason 'exploded' is unknown"),
        (event('{"content":"x"}', index=1), "choice with index 1"),
        (event('{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}'), "a tool call without a name"),
    ],
    ids=["not-json", "unknown-finish", "second-choice", "no-name"],
)
async def test_an_answer_that_does_not_follow_the_api_is_a_protocol_error(raw: str, words: str) -> None:
    with pytest.raises(ChatProtocolError, match=words):
        await ask(Reply(raw=raw))


async def test_cancelling_closes_the_stream_so_that_the_server_can_stop() -> None:
    first = asyncio.Event()
    with serve(Reply([{"content": "x"}], None, end="hang")) as endpoint:
        async with ChatClient(endpoint.base_url) as client:
            task = asyncio.create_task(client.complete(HELLO, on_delta=lambda _: first.set()))
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(endpoint.disconnected.wait, 5)
