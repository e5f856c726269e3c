"""Sessions through the Messages API: exact ids whatever a client keeps, and in turn with chat completions."""

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime.engine.sglang import SGLangEngine
from agent_runtime.gateway.app import create_app
from agent_runtime.gateway.forms import chat_body
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.guard.again import made_again
from agent_runtime.ledger.reading import LedgerReader
from k3_sglang.chat.tokenizer import K3Tokenizer
from tests.gateway.bodies import MODEL, WEATHER_TOOL
from tests.gateway.conftest import Running
from tests.gateway.messages import MARK, WEATHER, Json, ask, assembled, continued, events, post, result, text
from tests.gateway.serving import serving
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3.0")))
OUTPUTS = (("first thoughts", "I look.", (CALL,)), ("more thoughts", "", (CALL,)), ("last thoughts", "Rain.", ()))
SESSION = "d59432b8-c0f2-4965-9ea4-91b2741adc22"
USER_ID = json.dumps({"device_id": "e33583", "account_uuid": "", "session_id": SESSION})


@pytest.fixture
def settings(settings: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """With the guard's mode where a test asks for one."""
    return {**settings, "guard": getattr(request, "param", "repair")}


def plan(stub: StubEngine, ids: list[int]) -> None:
    """Have the engine say this next."""
    stub.plan = lambda body: says(ids, end_of_msg=END_OF_MSG, piece=1000)


def prompt(stub: StubEngine) -> list[int]:
    """The ids the engine was given last."""
    return stub.requests[-1]["input_ids"]


@pytest.mark.parametrize("kept", ["all", "signature", "text", "nothing"])
async def test_whatever_a_client_keeps_of_thinking_the_next_prompt_goes_on_from_the_last(
    gateway: Running, stub: StubEngine, writer: TurnWriter, kept: str
) -> None:
    body = ask(tools=[WEATHER])
    for number, output in enumerate(OUTPUTS):
        ids = writer.turn(*output)
        plan(stub, ids)
        answer = await post(gateway, body) if number else assembled(await events(gateway, body))
        expected = prompt(stub) + ids
        kept_answer = copy.deepcopy(answer)
        thinking = kept_answer["content"][0]
        if kept == "signature":
            thinking["thinking"] = ""
        elif kept == "text":
            thinking["signature"] = ""
        elif kept == "nothing":
            del kept_answer["content"][0]
        calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        following = result(calls[0], "rain") if calls else {"role": "user", "content": "Go on"}
        body = continued(body, kept_answer, following)
        answer = await post(gateway, body)
        assert prompt(stub)[: len(expected)] == expected
        assert answer["k3"]["replay"]["verdict"] == ("repaired" if kept == "nothing" else "exact")


async def test_a_signature_finds_its_turn_where_nothing_else_could(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    """Two turns with one text after one message, and a client that keeps neither thinking nor history."""
    answers: list[Json] = []
    for thoughts in ("thoughts of one", "thoughts of two"):
        plan(stub, writer.turn(thoughts, "Hi"))
        answers.append(await post(gateway, ask()))
    for answer, thoughts in zip(answers, ("thoughts of one", "thoughts of two"), strict=True):
        answer["content"][0]["thinking"] = ""
        again = await post(gateway, continued(ask(), answer, {"role": "user", "content": "Go on"}))
        assert again["k3"]["replay"]["verdict"] == "exact"
        asked = bytes(token for token in prompt(stub) if token < 256).decode()
        assert thoughts in asked
        answer["content"][0]["thinking"] = "altered on the way"
        again = await post(gateway, continued(ask(), answer, {"role": "user", "content": "Go on"}))
        assert again["k3"]["replay"]["turns"] == [{"index": 1, "verdict": "repaired", "reason": "foreign"}]
        asked = bytes(token for token in prompt(stub) if token < 256).decode()
        assert thoughts in asked and "altered" not in asked


async def test_a_forged_or_foreign_signature_leads_nowhere(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    plan(stub, writer.turn("private thoughts", "Hi"))
    await post(gateway, ask("mine"))
    for signature in ("k3.AAAA", "ErUBCkYIBxgC"):
        thinking = {"type": "thinking", "thinking": "", "signature": signature}
        turn = {"role": "assistant", "content": [thinking, text("Hi")]}
        body = {**ask(), "messages": [*ask("other")["messages"], turn, *ask()["messages"]]}
        answer = await post(gateway, body)
        assert answer["k3"]["replay"]["verdict"] == "missing"
        assert b"private" not in bytes(token for token in prompt(stub) if token < 256)


class Both:
    """One conversation, kept in the words of both protocols."""

    def __init__(self) -> None:
        system, said = "Be short.", "Weather in Oslo?"
        self.chat: list[Json] = [{"role": "system", "content": system}, {"role": "user", "content": said}]
        self.sent: list[Json] = [{"role": "user", "content": [text(said)]}]

    async def ask(self, gateway: Running, protocol: str) -> None:
        """The next turn, by one of the two; what follows is the same in both."""
        if protocol == "chat":
            metadata = {"session_id": SESSION}
            body = {"model": MODEL, "messages": self.chat, "tools": [WEATHER_TOOL], "metadata": metadata}
            message = (await gateway.ask(body))["choices"][0]["message"]
            thinking, prose = message.get("reasoning_content", ""), message["content"] or ""
            calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        else:
            body = ask(system=[text("Be short.")], tools=[WEATHER], metadata={"user_id": USER_ID})
            answer = await post(gateway, {**body, "messages": self.sent})
            found = {block["type"]: block for block in answer["content"]}
            thinking, prose = found["thinking"]["thinking"], found.get("text", {"text": ""})["text"]
            calls = [(b["id"], json.dumps(b["input"])) for b in answer["content"] if b["type"] == "tool_use"]
        self._keep(thinking, prose, calls)

    def _keep(self, thinking: str, prose: str, calls: list[tuple[str, str]]) -> None:
        functions = [
            {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": given}}
            for name, given in calls
        ]
        turn = {"role": "assistant", "content": prose, "reasoning_content": thinking, "tool_calls": functions}
        blocks = [{"type": "thinking", "thinking": thinking, "signature": ""}]
        blocks += [text(prose)] if prose else []
        blocks += [
            {"type": "tool_use", "id": name, "name": "get_weather", "input": json.loads(given)} for name, given in calls
        ]
        self.chat += [turn, *({"role": "tool", "tool_call_id": name, "content": "rain"} for name, _ in calls)]
        self.sent.append({"role": "assistant", "content": blocks})
        self.sent += [result(name, "rain") for name, _ in calls]
        if not calls:
            self.chat.append({"role": "user", "content": "Go on"})
            self.sent.append({"role": "user", "content": "Go on"})


async def test_a_session_driven_by_two_protocols_in_turn_has_the_ids_of_one_driven_by_one(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    outputs = [*OUTPUTS, *OUTPUTS]
    asked: dict[str, list[list[int]]] = {}
    for name, protocols in (("chat", ["chat"]), ("messages", ["messages"]), ("both", ["chat", "messages"])):
        session = Both()
        for number, output in enumerate(outputs):
            plan(stub, writer.turn(*output))
            await session.ask(gateway, protocols[number % len(protocols)])
            asked.setdefault(name, []).append(prompt(stub))
    assert asked["both"] == asked["chat"] == asked["messages"]
    counts = (await gateway.client.get("/v1/k3/replay")).json()
    assert counts["requests"] == {"new": 3, "exact": 15}


@pytest.mark.parametrize("settings", ["strict"], indirect=True)
async def test_a_strict_gateway_takes_signatures_for_thinking_and_names_what_is_missing(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    plan(stub, writer.turn("my thoughts", "Hi"))
    body = ask(system="Be short.")
    answer = await post(gateway, body)
    answer["content"][0]["thinking"] = ""
    await post(gateway, continued(body, answer, {"role": "user", "content": "Go on"}))
    del answer["content"][0]
    refused = await post(gateway, continued(body, answer, {"role": "user", "content": "Go on"}), 409)
    assert refused["error"]["message"].startswith("The history is not as it was generated: messages.1: its thinking")
    assert refused["k3"] == {"code": "history_not_intact", "param": "messages.1"}


def claude_code_body(*messages: Json) -> Json:
    """A request as Claude Code 2.1.332 sends it, with its longer texts cut."""
    system = [
        text("x-anthropic-billing-header: cc_version=2.1.332.e8f; cc_entrypoint=sdk-cli;"),
        text("You are a Claude agent, built on Anthropic's Claude Agent SDK.", cache_control=MARK),
        text("\nYou are an agent working with the user toward their goals.", cache_control=MARK),
    ]
    placeholder = {
        "name": "DeferredToolPlaceholder",
        "description": "Reserved placeholder that keeps deferred tool loading active; never call this tool.",
        "input_schema": {"type": "object", "properties": {}},
        "defer_loading": True,
    }
    fetch = {"name": "WebFetch", "description": "Fetches.", "input_schema": {"type": "object"}, "defer_loading": True}
    first = [text("<system-reminder>\nAttribution for git commits\n</system-reminder>\n"), text("run echo hi")]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": first}, *messages],
        "system": system,
        "tools": [WEATHER, placeholder, fetch],
        "metadata": {"user_id": USER_ID},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


async def test_a_session_as_claude_code_sends_it_is_served_exactly(
    gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    marked_note = {"role": "system", "content": [text("# Environment\nYou are here.", cache_control=MARK)]}
    note = {"role": "system", "content": "# Environment\nYou are here."}
    ids = writer.turn("I think.", "", (CALL,))
    plan(stub, ids)
    answer = assembled(await events(gateway, claude_code_body(marked_note)))
    assert answer["content"][0]["thinking"] == "" and answer["stop_reason"] == "tool_use"
    assert answer["context_management"] == {"applied_edits": []}
    first = prompt(stub)
    shown = bytes(token for token in first if token < 256).decode()
    assert "billing" not in shown and "Placeholder" not in shown and "WebFetch" not in shown
    call_id = answer["content"][-1]["id"]
    turn = {"role": "assistant", "content": answer["content"]}
    told = result(call_id, [{"type": "tool_reference", "tool_name": "WebFetch"}], cache_control=MARK)
    plan(stub, writer.turn("Done.", "hi"))
    second = claude_code_body(note, turn, told)
    second["system"][0] = text("x-anthropic-billing-header: cc_version=2.1.332.fff; cc_entrypoint=sdk-cli;")
    answer = assembled(await events(gateway, second))
    assert prompt(stub)[: len(first) + len(ids)] == first + ids
    assert "WebFetch" in bytes(token for token in prompt(stub) if token < 256).decode()
    facts = answer["k3"]["replay"]
    assert (facts["verdict"], facts["prefix"]) == ("exact", {"holds": True})
    assert answer["k3"]["cache"]["session"] == f"metadata:{SESSION}"


async def test_the_header_names_the_session_where_the_body_does_not(gateway: Running) -> None:
    headers = {"x-claude-code-session-id": "from-header"}
    for fields, session in (({}, "metadata:from-header"), ({"metadata": {"user_id": USER_ID}}, f"metadata:{SESSION}")):
        response = await gateway.client.post("/v1/messages", json=ask(**fields), headers=headers)
        assert response.json()["k3"]["cache"]["session"] == session
    named = await gateway.client.post("/v1/messages", json=ask(metadata={"user_id": "someone"}), headers=headers)
    assert named.json()["k3"]["cache"]["session"] == "metadata:from-header"


async def test_a_restarted_gateway_knows_signatures_and_a_ledger_can_be_gone_through_again(
    settings: dict[str, Any],
    tokenizer: K3Tokenizer,
    engine_url: str,
    stub: StubEngine,
    writer: TurnWriter,
    tmp_path: Path,
) -> None:
    settings["ledger"] = tmp_path / "ledger.db"
    body = ask()
    for thoughts in ("one", "two"):
        plan(stub, writer.turn(f"thoughts {thoughts}", "Hi"))
        app = create_app(GatewaySettings(**settings), SGLangEngine(engine_url), tokenizer)
        async with serving(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            response = await client.post("/v1/messages", json=body)
        answer = response.json()
        answer["content"][0]["thinking"] = ""
        body = continued(body, answer, {"role": "user", "content": "Go on"})
    assert "thoughts one" in bytes(token for token in prompt(stub) if token < 256).decode()
    assert response.headers["x-k3-replay"].startswith("exact")
    with LedgerReader(settings["ledger"]) as reader:
        outcomes = list(made_again(reader, tokenizer, read=chat_body))
        assert [step.facts["form"] for step in reader.steps()] == ["messages", "messages"]
    assert [outcome.same for outcome in outcomes] == [True, True]
