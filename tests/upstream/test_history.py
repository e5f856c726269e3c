"""Before another server: what a client loses of a history goes back as it came, and the verdict is told."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from agent_runtime.ledger.__main__ import main
from agent_runtime.ledger.reading import LedgerReader
from agent_runtime.upstream.again import sent_again
from agent_runtime.upstream.profiles import PROFILES
from tests.agent.scripted_endpoint import Reply, call, says, usage
from tests.gateway.bodies import chat, chat_with_tool, continued, streamed, tool_results, user
from tests.upstream.conftest import ask, before, scripted

ARGUMENTS = '{"city":  "Oslo", "days": 3.0}'
"""Spelled as no encoder would: the very text must come back."""


def turn(profile: str = "generic", thought: str = "I should look.", ids: str = "get_weather:0") -> Reply:
    """Thinking in the server's own field, a text, a call, whose name and arguments come in pieces."""
    field = PROFILES[profile].thinking_field  # type: ignore[index]
    first = {"index": 0, "id": ids, "type": "function", "function": {"name": "get_wea", "arguments": ""}}
    more = [
        {"tool_calls": [first]},
        {"tool_calls": [{"index": 0, "function": {"name": "ther", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[:9]}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[9:]}}]},
    ]
    thoughts = [{field: piece} for piece in (thought[:3], thought[3:])]
    return Reply([*thoughts, {"content": "Look"}, {"content": "ing."}, *more], "tool_calls", usage(100, 10, 50))


def losing(body: dict[str, Any]) -> dict[str, Any]:
    """The same history from a client that drops thinking and writes arguments and ids anew."""
    body = copy.deepcopy(body)
    for message in body["messages"]:
        message.pop("reasoning_content", None)
        for place, made in enumerate(message.get("tool_calls") or ()):
            made["function"]["arguments"] = json.dumps(json.loads(made["function"]["arguments"]), sort_keys=True)
            for other in body["messages"]:
                if other.get("tool_call_id") == made["id"]:
                    other["tool_call_id"] = f"Tool_{place}"
            made["id"] = f"Tool_{place}"
    return body


async def test_what_a_client_drops_goes_back_in_the_servers_field_and_spelling(profile: str) -> None:
    async with scripted(turn(profile), says("Rain."), profile=profile) as (endpoint, client):
        first = chat_with_tool()
        answer = await ask(client, first)
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "I should look."
        assert message["content"] == "Looking."
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        second = await ask(client, losing(continued(first, answer, *tool_results(answer, "rain"))))
    sent = endpoint.requests[1]["messages"]
    field = PROFILES[profile].thinking_field  # type: ignore[index]
    assert sent[1] == {
        "role": "assistant",
        field: "I should look.",
        "content": "Looking.",
        "tool_calls": [
            {
                "id": "get_weather:0",
                "type": "function",
                "function": {"name": "get_weather", "arguments": ARGUMENTS},
            }
        ],
    }
    assert sent[2] == {"role": "tool", "tool_call_id": "get_weather:0", "content": "rain"}
    assert second["headers"]["x-k3-replay"] == "repaired; exact=0; repaired=1; missing=0; foreign=0"
    assert second["k3"]["replay"]["prefix"] == {"holds": True}


async def test_an_echo_is_exact_and_streams_are_recorded_alike(profile: str) -> None:
    async with scripted(turn(profile), says("Rain."), profile=profile) as (endpoint, client):
        first = chat_with_tool()
        response = await client.post("/v1/chat/completions", json=streamed(first))
        message = joined(response.text)
        answer = {"choices": [{"message": message}]}
        second = await ask(client, continued(first, answer, *tool_results(answer, "rain")))
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert second["headers"]["x-k3-replay"].startswith("exact; exact=1;")
    assert second["k3"]["replay"]["prefix"] == {"holds": True}
    assert endpoint.requests[1]["messages"][:1] == endpoint.requests[0]["messages"]


def joined(stream: str) -> dict[str, Any]:
    """A streamed message put together as a client does it."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    message["tool_calls"].append(copy.deepcopy(piece))
                else:
                    message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


async def test_two_sessions_with_equal_openings_and_equal_server_ids_never_mix() -> None:
    script = [turn(thought="The first one's secret."), turn(thought="The second one's secret."), says("Rain.")]
    async with scripted(*script) as (endpoint, client):
        first = chat_with_tool()
        one = await ask(client, first, x_k3_session="one")
        two = await ask(client, first, x_k3_session="two")
        for answer, name in ((one, "one"), (two, "two")):
            body = losing(continued(first, answer, *tool_results(answer, "rain")))
            again = await ask(client, body, x_k3_session=name)
            assert again["headers"]["x-k3-session"] == name
        other = await ask(client, losing(continued(first, one, *tool_results(one, "rain"))), x_k3_session="third")
    thoughts = [request["messages"][1].get("reasoning_content") for request in endpoint.requests[2:]]
    assert thoughts == ["The first one's secret.", "The second one's secret.", None]
    assert other["headers"]["x-k3-replay"].startswith("missing;")
    ids = [one["choices"][0]["message"]["tool_calls"][0]["id"], two["choices"][0]["message"]["tool_calls"][0]["id"]]
    assert len(set(ids)) == 2, "the server's ids repeat, those that clients get do not"


async def test_a_moved_system_text_is_named_with_its_cost_in_bytes() -> None:
    async with scripted(says("One."), says("Two.")) as (_, client):
        first = chat("Hello")
        first["messages"].insert(0, {"role": "system", "content": "It is 10:41."})
        answer = await ask(client, first, x_k3_session="a")
        second = continued(first, answer, user("And?"))
        second["messages"][0] = {"role": "system", "content": "It is 10:42."}
        moved = await ask(client, second, x_k3_session="a")
        counters = (await client.get("/v1/k3/replay")).json()
    prefix = moved["k3"]["replay"]["prefix"]
    assert (prefix["holds"], prefix["moved"], prefix["index"]) == (False, "system_timestamp", 0)
    assert prefix["lost_bytes"] > 0 and prefix["common_bytes"] > 0
    assert "lost_tokens" not in prefix
    assert counters["prompts_moved"] == {"system_timestamp": 1}
    assert counters["lost_bytes"] == {"system_timestamp": prefix["lost_bytes"]}


async def test_strict_refuses_and_off_only_tells() -> None:
    async with scripted(turn(), says("Rain."), guard="strict") as (endpoint, client):
        first = chat_with_tool()
        answer = await ask(client, first)
        body = losing(continued(first, answer, *tool_results(answer, "rain")))
        refused = await ask(client, body, 409)
        assert refused["error"]["code"] == "history_not_intact" and refused["error"]["param"] == "messages[1]"
        assert len(endpoint.requests) == 1
    async with scripted(turn(), says("Rain."), guard="off") as (endpoint, client):
        answer = await ask(client, first)
        told = await ask(client, losing(continued(first, answer, *tool_results(answer, "rain"))))
        assert told["headers"]["x-k3-replay"].startswith("missing; exact=0; repaired=0; missing=1;")
        assert "reasoning_content" not in endpoint.requests[1]["messages"][1]


async def test_a_restart_forgets_nothing_and_the_ledger_makes_every_request_again(
    ledger: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = [turn("vllm"), says("Rain.", "second thoughts"), says("Bye.")]
    async with scripted(*script, profile="vllm", ledger=ledger) as (endpoint, client):
        first = chat_with_tool(temperature=0.5, seed=7, n=1)
        answer = await ask(client, first)
        body = continued(first, answer, *tool_results(answer, "rain"))
        answer = await ask(client, losing(body))
        async with before_again(endpoint.base_url, ledger) as restarted:
            last = await ask(restarted, losing(continued(body, answer, user("Bye"))))
    assert last["headers"]["x-k3-replay"].startswith("repaired; exact=0; repaired=2;")
    assert [m.get("reasoning") for m in endpoint.requests[2]["messages"]] == [
        None, "I should look.", None, "second thoughts", None,
    ]  # fmt: skip
    copied = ledger.with_name("copied.db")
    with LedgerReader(copied) as reader:
        made = list(sent_again(reader))
        assert reader.check() == []
    assert [step.same for step in made] == [True] * 3
    assert [json.loads(step.bodies[0]) for step in made] == endpoint.requests
    assert main(["replay", str(copied)]) == 0
    assert [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()] == endpoint.requests


def before_again(url: str, ledger: Path) -> Any:
    """A second gateway on a copy of the ledger, which the first still holds open."""
    copied = ledger.with_name("copied.db")
    for suffix in ("", "-wal"):
        source = Path(f"{ledger}{suffix}")
        if source.exists():
            Path(f"{copied}{suffix}").write_bytes(source.read_bytes())
    return before(url, "vllm", ledger=copied)


async def test_results_without_ids_answer_by_their_place_and_unknown_turns_keep_theirs() -> None:
    async with scripted(says("Rain.")) as (endpoint, client):
        made = {"id": "their-id", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
        body = chat_with_tool()
        body["messages"] += [
            {"role": "assistant", "content": None, "tool_calls": [made, {**made, "id": ""}]},
            {"role": "tool", "content": "rain"},
            {"role": "tool", "content": "snow"},
        ]
        told = await ask(client, body)
    calls = endpoint.requests[0]["messages"][1]["tool_calls"]
    assert [made["id"] for made in calls] == ["their-id", "call_1"]
    assert [message.get("tool_call_id") for message in endpoint.requests[0]["messages"][2:]] == ["their-id", "call_1"]
    assert told["headers"]["x-k3-replay"].startswith("missing;")


async def test_a_turn_that_was_cut_is_kept_as_far_as_it_is_complete() -> None:
    cut = Reply([{"reasoning_content": "think"}, call("get_weather", '{"city": "Os')], "length", usage(9, 9))
    async with scripted(cut) as (_, client):
        answer = await ask(client, chat_with_tool())
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
    assert choice["k3"]["incomplete_tool_calls"][0]["name"] == "get_weather"
