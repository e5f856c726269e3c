"""What the engine's cache is told with a request, and only when it understands it; positions equal the encoder's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.engine.types import EngineImage
from agent_runtime.gateway import cache_link
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.cache_fields import Session
from agent_runtime.gateway.positions import MAX_MARKS, Mark, Positions, positions_of
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.guard.history import NAMELESS
from agent_runtime.guard.prompt import HistoryGuard
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import ChatRequestError, parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest
from tests.gateway.bodies import WEATHER_TOOL, chat, chat_with_tool, continued, streamed, tool_results, user
from tests.gateway.conftest import Running
from tests.gateway.serving import serving
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter, byte_tokenizer

FIVE_MINUTES = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SYSTEM = {"role": "system", "content": "You are terse."}


@pytest.fixture
def stub(stub: StubEngine) -> StubEngine:
    """The scripted engine with the checkpoint cache."""
    stub.cache_backend = "k3"
    return stub


def hints(stub: StubEngine, request: int = -1) -> dict[str, Any]:
    """What the cache was told with a request."""
    return json.loads(stub.requests[request]["sampling_params"]["custom_params"]["k3_cache"])


def beginning(request: ChatRequest, messages: int, tokenizer: K3Tokenizer) -> tuple[int, ...]:
    """Ids of the first messages of a request, nothing behind them."""
    first = replace(request, messages=request.messages[:messages], tool_choice=None, response_format=None)
    return encode(replace(first, add_generation_prompt=False), tokenizer).ids


def positions(body: dict[str, Any], tokenizer: K3Tokenizer) -> tuple[tuple[int, ...], Positions]:
    """Ids and positions of a body's prompt."""
    built = HistoryGuard(TurnIndex(1000, 10)).look(parse_request(body), NAMELESS, tokenizer)
    return built.prompt.ids, positions_of(built, tokenizer)


# --- positions --------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from("ab <|"), max_size=6)
_MARK = st.sampled_from([{}, {}, FIVE_MINUTES, HOUR])


@st.composite
def _message(draw: st.DrawFn) -> dict[str, Any]:
    role = draw(st.sampled_from(["system", "user", "assistant", "developer"]))
    return {"role": role, "content": draw(_TEXT), **draw(_MARK)}


@hypothesis_settings(deadline=None)
@given(
    messages=st.lists(_message(), min_size=1, max_size=7),
    tools=st.booleans(),
    choice=st.sampled_from([None, "none"]),
    effort=st.sampled_from(["low", "none"]),
)
def test_every_position_is_where_the_encoder_ends_that_message(
    messages: list[dict[str, Any]], tools: bool, choice: str | None, effort: str
) -> None:
    tokenizer = byte_tokenizer()
    body = {"messages": messages, "reasoning_effort": effort, "tool_choice": choice}
    body |= {"tools": [{**WEATHER_TOOL, **HOUR}]} if tools else {}
    request = parse_request(body)
    ids, found = positions(body, tokenizer)
    assert ids == encode(request, tokenizer).ids
    system = next((i for i, message in enumerate(request.messages) if message.role != "system"), len(messages))
    assert ids[: found.head_len] == beginning(request, system, tokenizer)
    assert ids[: found.history_len] == beginning(request, len(messages), tokenizer)
    assert found.one_shot == (choice is not None)
    marked = [
        (len(beginning(request, index + 1, tokenizer)), 3600 if message["cache_control"].get("ttl") else 300)
        for index, message in enumerate(messages)
        if "cache_control" in message
    ]
    if tools:
        marked.insert(0, (len(beginning(replace(request, effort=None), 0, tokenizer)), 3600))
    assert [(mark.position, mark.ttl_s) for mark in found.marks] == marked


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_the_mark_of_a_content_part_lies_at_the_last_token_of_that_part(role: str, tokenizer: K3Tokenizer) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in ("one", "", "two", "three")]
    parts[2] |= FIVE_MINUTES
    message = {"role": role, "content": parts, **({"name": "get_weather"} if role == "tool" else {})}
    ids, found = positions({"messages": [message, user("go")]}, tokenizer)
    (mark,) = found.marks
    whole, _ = positions({"messages": [{**message, "content": "onetwo"}, user("go")]}, tokenizer)
    assert ids[: mark.position] == whole[: mark.position]
    assert tokenizer.decode_bytes(ids[: mark.position]).endswith(b"onetwo")


def test_marks_of_the_last_part_and_of_assistant_messages_are_the_messages_own(tokenizer: K3Tokenizer) -> None:
    def marked(text: str, **mark: Any) -> dict[str, Any]:
        return {"type": "text", "text": text, **mark}

    messages = [
        {"role": "user", "content": [marked("a"), marked("b", **FIVE_MINUTES)], **HOUR},
        {"role": "assistant", "content": [marked("c", **FIVE_MINUTES), marked("d")]},
        user("e"),
    ]
    request = parse_request({"messages": messages})
    _, found = positions({"messages": messages}, tokenizer)
    ends = [len(beginning(request, count, tokenizer)) for count in (1, 2)]
    assert found.marks == (Mark(ends[0], 3600), Mark(ends[1], 300))


def test_marks_on_tools_are_not_shown_to_the_model_wherever_they_stand(tokenizer: K3Tokenizer) -> None:
    plain = {"messages": [user("go")], "tools": [WEATHER_TOOL]}
    for tool in ({**WEATHER_TOOL, **HOUR}, {**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], **HOUR}}):
        ids, found = positions({**plain, "tools": [tool]}, tokenizer)
        assert ids == positions(plain, tokenizer)[0]
        assert [mark.ttl_s for mark in found.marks] == [3600]
    declared = {"role": "system", "tools": [{**WEATHER_TOOL, **HOUR}]}
    _, found = positions({"messages": [user("a"), declared, user("b")]}, tokenizer)
    request = parse_request({"messages": [user("a"), declared, user("b")]})
    assert found.marks == (Mark(len(beginning(request, 2, tokenizer)), 3600),)


def test_results_are_marked_in_the_order_of_the_prompt_and_a_split_turn_at_its_end(tokenizer: K3Tokenizer) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("x", "y")]
    messages = [
        user("go"),
        {"role": "assistant", "content": "prose", **HOUR},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y", "content": "second", **FIVE_MINUTES},
        {"role": "tool", "tool_call_id": "x", "content": "first"},
    ]
    ids, found = positions({"messages": messages}, tokenizer)
    request = parse_request({"messages": messages})
    assert found.marks == (Mark(len(beginning(request, 2, tokenizer)), 3600), Mark(found.history_len, 300))
    assert ids == encode(request, tokenizer).ids


def test_of_many_marks_the_deepest_count(tokenizer: K3Tokenizer) -> None:
    messages = [{**user(str(index)), **FIVE_MINUTES} for index in range(MAX_MARKS + 5)]
    _, found = positions({"messages": messages}, tokenizer)
    assert len(found.marks) == MAX_MARKS
    assert found.marks[-1].position == found.history_len


def test_images_count_as_the_tokens_they_become() -> None:
    pad = 9
    ids = [0, pad, 1, 2, pad, 3]
    given_positions = Positions(1, 6, False, (Mark(2, 300), Mark(4, 300), Mark(5, 300)))
    images = (EngineImage("data:a", 10), EngineImage("data:b", 100))
    moved = given_positions.expanded(ids, images, pad)
    assert (moved.head_len, moved.history_len) == (1, 6 + 9 + 99)
    assert [mark.position for mark in moved.marks] == [11, 13, 113]


@pytest.mark.parametrize(
    "mark", [{"type": "x"}, {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "a": 1}, "ephemeral", []]
)
@pytest.mark.parametrize("place", ["message", "part", "tool"])
def test_a_mark_of_another_shape_is_refused_where_it_stands(mark: Any, place: str) -> None:
    message: dict[str, Any] = user("go")
    body: dict[str, Any] = {"messages": [message]}
    if place == "message":
        message["cache_control"] = mark
    elif place == "part":
        message["content"] = [{"type": "text", "text": "go", "cache_control": mark}]
    else:
        body["tools"] = [{**WEATHER_TOOL, "cache_control": mark}]
    with pytest.raises(ChatRequestError) as caught:
        parse_request(body)
    assert caught.value.code == "invalid_cache_control"
    assert caught.value.param.endswith("cache_control")


# --- what is sent -----------------------------------------------------------------------------------------------------


async def test_a_request_tells_the_head_the_marks_and_the_session(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    body = chat_with_tool(prompt_cache_key="s")
    body["messages"] = [SYSTEM, {**user("long"), **HOUR}, user("short")]
    answer = await gateway.ask(body)
    told = hints(stub)
    request = parse_request({key: body[key] for key in ("messages", "tools")})
    assert told.pop("now_s") > 1e9
    assert told == {
        "head_len": len(beginning(request, 1, tokenizer)),
        "pins": [[len(beginning(request, 2, tokenizer)), 3600]],
        "session": "prompt_cache_key:s",
    }
    assert answer["k3"]["cache"] == {"cached_tokens": 0, "hinted": True, "session": "prompt_cache_key:s"}


async def test_the_end_of_the_history_is_told_only_before_an_instruction_for_one_turn(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    body = chat_with_tool()
    await gateway.ask(body)
    assert "boundaries" not in hints(stub)
    await gateway.ask({**body, "tool_choice": "none"})
    request = parse_request({key: body[key] for key in ("messages", "tools")})
    assert hints(stub)["boundaries"] == [len(beginning(request, 1, tokenizer))]


async def test_a_mark_on_the_last_message_keeps_the_end_of_the_prompt_which_is_a_checkpoint_anyway(
    gateway: Running, stub: StubEngine, tokenizer: K3Tokenizer
) -> None:
    body = chat_with_tool()
    body["messages"] = [{**user("go"), **HOUR}]
    await gateway.ask(body)
    assert hints(stub)["pins"] == [[len(stub.requests[0]["input_ids"]), 3600]]
    await gateway.ask({**body, "tool_choice": "none"})
    request = parse_request({key: body[key] for key in ("messages", "tools")})
    assert hints(stub)["pins"] == [[len(beginning(request, 1, tokenizer)), 3600]]


async def test_positions_are_those_of_the_ids_that_are_sent_when_turns_are_replayed(
    gateway: Running, stub: StubEngine, writer: TurnWriter, tokenizer: K3Tokenizer
) -> None:
    """The model spelled its turn as the encoder would not, so only the sent ids tell where a message ends."""
    odd = writer.turn("T", "", (("get_weather", (("city", "string", "Oslo"), ("days", "number", "1e0"))),))
    stub.plan = lambda body: says(odd, end_of_msg=tokenizer.special.end_of_msg)
    body = chat_with_tool()
    answer = await gateway.ask(body)
    body = continued(body, answer, *({**result, **HOUR} for result in tool_results(answer, "rain")), user("so?"))
    await gateway.ask(body)
    sent = stub.requests[-1]["input_ids"]
    ((position, seconds),) = hints(stub)["pins"]
    assert seconds == 3600
    assert sent[: len(stub.requests[0]["input_ids"]) + len(odd)] == [*stub.requests[0]["input_ids"], *odd]
    assert tokenizer.decode_bytes(sent[:position]).endswith(b"rain<|close|>message<|sep|><|end_of_msg|>")


async def test_what_a_caller_knows_of_the_future_is_passed_on(gateway: Running, stub: StubEngine) -> None:
    known = {"wait_s": 12, "release": True, "fork": 8, "pin_s": 60.5}
    await gateway.ask(chat(k3={"cache": {"session": "mine", **known}}, prompt_cache_key="other"))
    told = hints(stub)
    assert {key: told[key] for key in known} == known
    assert told["session"] == "session:mine"


@pytest.mark.parametrize(
    ("cache", "param"),
    [
        ({"wait_s": -1}, "k3.cache.wait_s"),
        ({"wait_s": 1e9}, "k3.cache.wait_s"),
        ({"release": 1}, "k3.cache.release"),
        ({"fork": 1.5}, "k3.cache.fork"),
        ({"fork": 10**9}, "k3.cache.fork"),
        ({"session": ""}, "k3.cache.session"),
        ({"sesion": "a"}, "k3.cache.sesion"),
        ("yes", "k3.cache"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(offline: Running, cache: Any, param: str) -> None:
    error = (await offline.ask(chat(k3={"cache": cache}), 400))["error"]
    assert error["param"] == param


async def test_sessions_are_found_in_the_documented_order_and_never_mixed(gateway: Running, stub: StubEngine) -> None:
    fields: dict[str, Any] = {
        "k3": {"cache": {"session": "n"}},
        "prompt_cache_key": "n",
        "metadata": {"session_id": "n", "other": "x"},
        "user": "n",
    }
    headers = {"x-k3-session": "n2", "x-session-id": "n"}
    found: list[str | None] = []
    for left_out in ("", "k3", "x-k3-session", "x-session-id", "prompt_cache_key", "metadata", "user"):
        fields.pop(left_out, None)
        headers.pop(left_out, None)
        response = await gateway.client.post("/v1/chat/completions", json=chat(**fields), headers=headers)
        found.append(response.json()["k3"]["cache"].get("session"))
    names = ["session:n", "session:n2", "x-session-id:n", "prompt_cache_key:n", "metadata:n", "user:n", None]
    assert found == names
    told = [hints(stub, request).get("session") for request in range(7)]
    assert len(set(told)) == 7
    assert told[:5] == names[:5]


async def test_a_person_is_not_named_to_the_engine_and_long_names_are_shortened(
    gateway: Running, stub: StubEngine
) -> None:
    response = await gateway.client.post("/v1/chat/completions", json=chat(user="jo@example.org"))
    assert "x-k3-session" not in response.headers
    assert "jo" not in hints(stub)["session"].partition("#")[2]
    await gateway.ask(chat(prompt_cache_key="k" * 512))
    assert len(hints(stub)["session"]) < 64
    assert Session("user", "a").engine_name != Session("user", "b").engine_name


async def test_a_person_is_not_told_to_be_one_conversation(gateway: Running, stub: StubEngine) -> None:
    """Else each of a person's conversations would leave the others, and their checkpoints go first."""
    await gateway.ask(chat(user="jo"))
    assert hints(stub)["is_conversation"] is False
    await gateway.ask(chat(prompt_cache_key="jo"))
    assert "is_conversation" not in hints(stub)


@pytest.mark.parametrize(("backend", "wanted"), [(None, True), ("hiradix", True), ("k3", False)])
async def test_without_our_cache_or_with_hints_off_nothing_is_told(
    settings: dict[str, Any], tokenizer: K3Tokenizer, stub: StubEngine, backend: str | None, wanted: bool
) -> None:
    stub.cache_backend = backend
    async with serving(stub.app()) as url:
        app = create_app(GatewaySettings(**settings, cache_hints=wanted), SGLangEngine(url), tokenizer)
        async with serving(app) as own, httpx.AsyncClient(base_url=own, trust_env=False) as client:
            answer = await Running(app, own, client).ask(chat(prompt_cache_key="s", messages=[{**user("a"), **HOUR}]))
    assert "custom_params" not in stub.requests[0]["sampling_params"]
    assert answer["k3"]["cache"]["hinted"] is False


async def test_an_engine_that_is_up_later_is_asked_until_it_answers(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_link, "RETRY_S", 0.01)
    async with serving(stub.app()) as url:
        engine = SGLangEngine(url)
        answers = [False, False, True]
        link = cache_link.CacheLink(engine)
        ask = link.ask

        async def later() -> bool:
            return answers.pop(0) and await ask()

        monkeypatch.setattr(link, "ask", later)
        await link.first_ask()
        assert not link.active
        await link.keep_asking()
        assert link.active
        assert answers == []
        await engine.aclose()


# --- what is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_why_not_more_was_cached(
    gateway: Running, stub: StubEngine, writer: TurnWriter, tokenizer: K3Tokenizer, stream: bool
) -> None:
    facts = {"why_not_more": "no_state", "no_state_tokens": 40}

    def plan(body: dict[str, Any]) -> Any:
        script = says(writer.turn("T", "Hi"), end_of_msg=tokenizer.special.end_of_msg, cached_tokens=7)
        script.cache_facts = facts
        return script

    stub.plan = plan
    body = chat(prompt_cache_key="s", n=2)
    if stream:
        text = (await gateway.client.post("/v1/chat/completions", json=streamed(body))).text
        told = [event["k3"]["cache"] for event in _events(text) if "k3" in event]
        assert len(told) == 2
    else:
        answer = await gateway.ask(body)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
        told = [answer["k3"]["cache"]]
    for cache in told:
        assert cache == {**facts, "cached_tokens": 7, "hinted": True, "session": "prompt_cache_key:s"}


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]
