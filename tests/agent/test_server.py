"""An agent behind HTTP, in the shape `AgentServer(endpoint, registry).start(port)`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from agent_runtime.tools.registry import ToolRegistry
from agent_runtime.tools.server import AgentServer, ServerOptions
from tests.agent.scripted_endpoint import Endpoint, Reply, calls, says, serve

registry = ToolRegistry()


@registry.register("add", "Adds two numbers.")
async def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


@contextmanager
def served(*script: Reply, options: ServerOptions | None = None) -> Iterator[tuple[httpx.Client, Endpoint]]:
    with serve(*script) as endpoint:
        server = AgentServer(endpoint.base_url, registry, options).start(0, block=False)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=30) as client:
                yield client, endpoint
        finally:
            server.stop()


def test_a_task_is_run_and_the_session_goes_on() -> None:
    with served(calls(("add", {"a": 1, "b": 2})), says("3"), says("bye")) as (client, endpoint):
        first = client.post("/run", json={"task": "go"}).json()
        second = client.post("/run", json={"task": "thanks", "session": first["session"]}).json()
        other = client.post("/run", json={"task": "hello"}).json()
        tools = client.get("/tools").json()["tools"]
        health = client.get("/health").json()
    assert (first["status"], first["text"]) == ("completed", "3")
    assert first["steps"][0]["tools"][0]["result"] == "3" and first["usage"]["cached_tokens"] == 100
    assert second["session"] == first["session"] != other["session"]
    assert endpoint.requests[2]["messages"][:4] == [
        *endpoint.requests[1]["messages"],
        endpoint.requests[2]["messages"][3],
    ]
    assert len(endpoint.requests[3]["messages"]) == 1, "another session begins anew"
    assert [tool["function"]["name"] for tool in tools] == ["add"] and health == {"status": "ok", "sessions": 2}


def test_a_run_can_be_streamed_as_events() -> None:
    with served(calls(("add", {"a": 1, "b": 2})), says("3")) as (client, _):
        text = client.post("/run", json={"task": "go", "stream": True, "session": "mine"}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    names = [event["event"] for event in events]
    assert names[0] == "step_started" and names[-1] == "run_finished" and "tool_finished" in names
    assert events[-1]["session"] == "mine" and events[-1]["text"] == "3"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be an object"),
        (b"{}", "task is required"),
        (b'{"task": "x", "taks": 1}', "unknown fields ['taks']"),
        (b'{"task": " "}', "blank user message"),
        (b'{"task": "x", "stream": 1}', "stream is true or false"),
    ],
)
def test_a_request_that_cannot_be_understood_is_refused_with_the_reason(body: bytes, words: str) -> None:
    with served(says("x")) as (client, endpoint):
        answer = client.post("/run", content=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert endpoint.requests == []


def test_an_endpoint_that_fails_is_a_502_and_in_a_stream_an_event() -> None:
    down = Reply(status=400, body={"error": {"message": "no such model"}})
    with served(down) as (client, _):
        plain = client.post("/run", json={"task": "go"})
        streamed = client.post("/run", json={"task": "go", "stream": True}).text
    assert plain.status_code == 502 and "no such model" in plain.json()["error"]["message"]
    assert '"event": "error"' in streamed and "no such model" in streamed


def test_a_session_has_one_run_at_a_time_and_a_client_that_leaves_ends_it() -> None:
    with served(Reply([{"content": "x"}], None, end="hang")) as (client, endpoint):
        with client.stream("POST", "/run", json={"task": "go", "session": "s", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert any("content_delta" in line for line in lines)
            busy = client.post("/run", json={"task": "me too", "session": "s"})
        assert endpoint.disconnected.wait(30), "a client that leaves ends its run"
    assert busy.status_code == 409 and "one turn at a time" in busy.json()["error"]["message"]


def test_sessions_are_bounded_and_the_oldest_goes_first() -> None:
    with served(says("x"), options=ServerOptions(max_sessions=2)) as (client, endpoint):
        for name in ("a", "b", "a", "c", "a"):
            client.post("/run", json={"task": name, "session": name})
        assert client.get("/health").json()["sessions"] == 2
    assert len(endpoint.requests[-1]["messages"]) == 5, "session a was never dropped"
