"""The guard over HTTP: verdicts where clients can see them, sessions by name, modes, what moved in a prompt."""

import copy
from typing import Any

import pytest

from tests.gateway.bodies import WEATHER_TOOL, chat, chat_with_tool, continued, tool_results, user
from tests.gateway.conftest import Running
from tests.gateway.stub_engine import StubEngine, says
from tests.gateway.vocabulary import TurnWriter

END_OF_MSG = 258
ODD_CALL = ("get_weather", (("city", "string", "Oslo"), ("days", "number", "3.0")))


class Client:
    """Asks for turns with a model that says what it is told to."""

    def __init__(self, gateway: Running, stub: StubEngine, writer: TurnWriter) -> None:
        self.gateway = gateway
        self.stub = stub
        self.writer = writer

    async def ask(self, body: dict[str, Any], reasoning: str, content: str = "", calls: Any = ()) -> dict[str, Any]:
        """The answer to a request."""
        ids = self.writer.turn(reasoning, content, calls)
        self.stub.plan = lambda _: says(ids, end_of_msg=END_OF_MSG, piece=1000)
        return await self.gateway.ask(body)

    @property
    def prompt(self) -> list[int]:
        """The ids the engine was given last."""
        return self.stub.requests[-1]["input_ids"]


@pytest.fixture
def client(gateway: Running, stub: StubEngine, writer: TurnWriter) -> Client:
    """A client of the served gateway."""
    return Client(gateway, stub, writer)


def without_thinking(body: dict[str, Any]) -> dict[str, Any]:
    """The request of a client that does not keep thinking."""
    sent = copy.deepcopy(body)
    for message in sent["messages"]:
        message.pop("reasoning_content", None)
    return sent


async def test_a_client_that_drops_thinking_gets_the_prompt_of_one_that_keeps_it(client: Client) -> None:
    first = chat_with_tool()
    answer = await client.ask(first, "my thoughts", "I look.", (ODD_CALL,))
    second = continued(first, answer, *tool_results(answer, "rain"))
    whole = await client.ask(second, "more thoughts", "Rain.")
    prompt = client.prompt
    assert whole["k3"]["replay"]["verdict"] == "exact"
    repaired = await client.ask(without_thinking(second), "more thoughts", "Rain.")
    assert client.prompt == prompt
    facts = repaired["k3"]["replay"]
    assert facts["verdict"] == "repaired"
    assert facts["turns"] == [{"index": 1, "verdict": "repaired", "reason": "absent"}]
    assert facts["prefix"] == {"holds": True}


async def test_names_of_models_have_no_part_in_it(
    settings: dict[str, Any], gateway: Running, stub: StubEngine, writer: TurnWriter
) -> None:
    """Case 3 of the survey: thinking lost because a table did not have the model."""
    client = Client(gateway, stub, writer)
    body = chat(model=settings["model_aliases"][0])
    answer = await client.ask(body, "my thoughts", "Hi")
    again = await client.ask(without_thinking(continued(body, answer, user("go on"))), "x", "y")
    assert again["k3"]["replay"]["verdict"] == "repaired"


@pytest.fixture
def settings(settings: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """With an alias, and with the guard's mode where a test asks for one."""
    marker = request.node.get_closest_marker("parametrize")
    mode = request.node.callspec.params.get("mode", "repair") if marker is not None else "repair"
    return {**settings, "model_aliases": ["kimi-k3.1-pro"], "guard": mode}


@pytest.mark.parametrize("mode", ["strict"])
async def test_strict_mode_names_the_turn_and_what_is_wrong(client: Client, mode: str) -> None:
    body = chat_with_tool()
    answer = await client.ask(body, "my thoughts", "I look.", (ODD_CALL,))
    second = continued(body, answer, *tool_results(answer, "rain"))
    refused = await client.gateway.ask(without_thinking(second), status=409)
    assert refused["error"]["code"] == "history_not_intact"
    assert refused["error"]["param"] == "messages[1]"
    assert "messages[1]: its thinking is not there" in refused["error"]["message"]
    fine = await client.ask(second, "x", "y")
    assert fine["k3"]["replay"]["verdict"] == "exact"
    stranger = {**body, "messages": [user("hi"), {"role": "assistant", "content": "hello"}, user("go on")]}
    refused = await client.gateway.ask(stranger, status=409)
    assert "was not generated here" in refused["error"]["message"]
    counts = (await client.gateway.client.get("/v1/k3/replay")).json()
    assert counts["refused_requests"] == 2


@pytest.mark.parametrize("mode", ["off"])
async def test_off_only_tells(client: Client, mode: str) -> None:
    body = chat()
    answer = await client.ask(body, "my thoughts", "Hi")
    second = continued(body, answer, user("go on"))
    await client.ask(second, "x", "y")
    exact = client.prompt
    told = await client.ask(without_thinking(second), "x", "y")
    assert len(client.prompt) == len(exact) - len("my thoughts")
    assert told["k3"]["replay"]["verdict"] == "missing"


@pytest.mark.parametrize("name", ["header", "body"])
async def test_named_sessions_with_equal_openings_get_their_own_thinking(client: Client, name: str) -> None:
    async def ask(session: str, body: dict[str, Any], reasoning: str) -> dict[str, Any]:
        if name == "body":
            return await client.ask({**body, "prompt_cache_key": session}, reasoning, "Hi")
        client.gateway.client.headers["x-k3-session"] = session
        return await client.ask(body, reasoning, "Hi")

    answers = {session: await ask(session, chat(), f"thoughts of {session}") for session in ("a", "b", "c")}
    for session, answer in answers.items():
        sent = without_thinking(continued(chat(), answer, user("go on")))
        again = await ask(session, sent, "x")
        assert again["k3"]["replay"]["verdict"] == "repaired"
        text = bytes(token for token in client.prompt if token < 256).decode()
        assert f"thoughts of {session}" in text
        assert sum(f"thoughts of {other}" in text for other in answers) == 1
    stranger = await ask("d", without_thinking(continued(chat(), answers["a"], user("go on"))), "x")
    assert stranger["k3"]["replay"]["verdict"] == "missing"


async def test_nameless_sessions_that_differ_in_thinking_only_are_flagged_never_guessed(client: Client) -> None:
    for number in range(3):
        answer = await client.ask(chat(), f"thoughts {number}", "Hi")
    again = await client.ask(without_thinking(continued(chat(), answer, user("go on"))), "x", "y")
    facts = again["k3"]["replay"]
    assert facts["turns"] == [{"index": 1, "verdict": "missing", "reason": "ambiguous"}]
    assert b"thoughts" not in bytes(token for token in client.prompt if token < 256)


SECOND_TOOL = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def moved(what: str) -> dict[str, Any]:
    """Changes to the second request of a session, by what they move."""
    return {
        "tools_order": {"tools": [SECOND_TOOL, WEATHER_TOOL]},
        "tools": {"tools": [WEATHER_TOOL]},
        "effort": {"reasoning_effort": "low"},
        "system_timestamp": "It is Tuesday, 2026-11-30, 10:31.",
        "system_task_list": "Tasks:\n- [x] look\n- [ ] tell",
        "system_text": "You are kind.",
        "message": None,
        "left_out": None,
    }[what]


@pytest.mark.parametrize(
    ("what", "first_system"),
    [
        ("tools_order", "S"),
        ("tools", "S"),
        ("effort", "S"),
        ("system_timestamp", "It is Tuesday, 2026-11-30, 10:30."),
        ("system_task_list", "Tasks:\n- [ ] look\n- [ ] tell"),
        ("system_text", "You are good."),
        ("message", "S"),
        ("left_out", "S"),
    ],
)
async def test_what_moved_in_a_prompt_is_named_with_its_cost(client: Client, what: str, first_system: str) -> None:
    body = chat("Weather in Oslo?", tools=[WEATHER_TOOL, SECOND_TOOL])
    body["messages"].insert(0, {"role": "system", "content": first_system})
    answer = await client.ask(body, "my thoughts", "I look.", (ODD_CALL,))
    first = client.prompt
    total = len(first) + answer["usage"]["completion_tokens"]
    second = continued(body, answer, *tool_results(answer, "rain"))
    change = moved(what)
    if isinstance(change, dict):
        second = {**second, **change}
    elif isinstance(change, str):
        second["messages"][0] = {"role": "system", "content": change}
    elif what == "message":
        second["messages"][1] = user("Weather in Rome?")
    else:
        second["messages"] = [second["messages"][0], *second["messages"][2:]]
    facts = (await client.ask(second, "x", "y"))["k3"]["replay"]
    assert facts["verdict"] == "exact"
    prefix = facts["prefix"]
    assert prefix["holds"] is False
    assert prefix["moved"] == ("message" if what == "left_out" else what)
    common = next(at for at, (old, new) in enumerate(zip(first, client.prompt, strict=False)) if old != new)
    assert prefix["common_tokens"] == common
    assert prefix["lost_tokens"] == total - common
    counts = (await client.gateway.client.get("/v1/k3/replay")).json()
    assert counts["lost_tokens"] == {prefix["moved"]: total - common}
    assert counts["violations"] == 0


async def test_an_instruction_for_one_turn_is_named_as_what_moved(client: Client) -> None:
    body = chat_with_tool(tool_choice="required")
    answer = await client.ask(body, "R", "", (ODD_CALL,))
    del body["tool_choice"]
    again = await client.ask(continued(body, answer, *tool_results(answer, "x")), "x", "y")
    assert again["k3"]["replay"]["prefix"]["moved"] == "one_shot"


@pytest.mark.parametrize(("name", "verdict"), [("prompt_cache_key", "repaired"), ("user", "missing")])
async def test_a_turn_left_out_is_put_back_in_a_named_conversation_not_in_those_of_a_person(
    client: Client, name: str, verdict: str
) -> None:
    """A person may have two conversations with the same opening, and only one of them has the turn."""
    body = chat(**{name: "somebody"})
    await client.ask(body, "my thoughts", "Hi")
    again = await client.ask({**body, "messages": [*body["messages"], user("go on")]}, "x", "y")
    assert again["k3"]["replay"]["turns"] == [{"index": 1, "verdict": verdict, "reason": "dropped"}]
    text = bytes(token for token in client.prompt if token < 256)
    assert (b"my thoughts" in text) == (verdict == "repaired")


async def test_counts_are_published(client: Client) -> None:
    answer = await client.ask(chat(), "my thoughts", "Hi")
    await client.ask(continued(chat(), answer, user("go on")), "x", "y")
    counts = (await client.gateway.client.get("/v1/k3/replay")).json()
    assert counts["requests"] == {"new": 1, "exact": 1}
    assert counts["prompts_extended"] == 1
    assert counts["known_turns"] == 2
