"""What the matrix of clients reads off recorded exchanges, in each protocol, whole and streamed."""

import json
import socket
from typing import Any

import httpx
import pytest

from clients.catalog import CLIENTS, chosen
from clients.matrix import Row, markdown, seen
from clients.recorder import Exchange, fenced, recording
from clients.runner import DRIVERS, Outcome
from clients.wire import steps

VERDICT = {"x-k3-replay": "repaired; exact=2; repaired=1; missing=0; foreign=0"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


def exchange(
    path: str, request: dict[str, Any], answer: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> Exchange:
    """A POST and its answer."""
    return Exchange("POST", path, json.dumps(request).encode(), status, {**VERDICT, **(headers or {})}, answer)


def stream(*events: dict[str, Any], done: bool = False) -> bytes:
    """Server-sent events."""
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n" * done


CHAT_CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
CHAT_USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
MESSAGES_USAGE = {"input_tokens": 3, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 4}
ITEM = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESPONSE = {
    "object": "response",
    "output": [ITEM],
    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}},
}
WHOLE = {
    "/v1/chat/completions": {"choices": [{"message": {"tool_calls": [CHAT_CALL]}}], "usage": CHAT_USAGE},
    "/v1/messages": {"content": [TOOL_USE], "usage": MESSAGES_USAGE},
    "/v1/responses": RESPONSE,
}
STREAMED = {
    "/v1/chat/completions": stream(
        {"choices": [{"delta": {"tool_calls": [CHAT_CALL]}}]}, {"choices": [], "usage": CHAT_USAGE}, done=True
    ),
    "/v1/messages": stream(
        {"type": "message_start", "message": {"content": [], "usage": MESSAGES_USAGE}},
        {"type": "content_block_start", "content_block": TOOL_USE},
        {"type": "message_stop"},
    ),
    "/v1/responses": stream(
        {"type": "response.output_item.done", "item": ITEM}, {"type": "response.completed", "response": RESPONSE}
    ),
}
RESULTS = {
    "/v1/chat/completions": {"messages": [{"role": "tool", "tool_call_id": "c1", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}]},
    "/v1/responses": {"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]},
}


@pytest.mark.parametrize("path", WHOLE)
def test_a_step_is_read_alike_from_a_whole_answer_and_a_stream(path: str) -> None:
    whole = exchange(path, RESULTS[path], json.dumps(WHOLE[path]).encode())
    streamed = exchange(path, RESULTS[path], STREAMED[path], headers=EVENTS)
    for step, is_stream in zip(steps([whole, streamed]), (False, True), strict=True):
        assert (step.streamed, step.complete, step.error) == (is_stream, True, "")
        assert (step.calls, step.results) == ({"c1"}, {"c1"})
        assert (step.prompt_tokens, step.cached_tokens) == (9, 4)
        assert step.turns == {"exact": 2, "repaired": 1}


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_that_was_cut_is_not_complete(path: str) -> None:
    (step,) = steps([exchange(path, {}, STREAMED[path][:-40], headers=EVENTS)])
    assert step.streamed and not step.complete


def test_other_requests_are_no_steps_and_errors_of_any_shape_are_told() -> None:
    listing = Exchange("GET", "/v1/models", b"", 200)
    shaped = exchange("/v1/responses", {}, b'{"error": {"message": "no\\nsuch field"}}', 400)
    flat = exchange("/v1/chat/completions", {}, b"plain words", 422)
    assert [step.error for step in steps([listing, shaped, flat])] == ["400: no such field", "422: plain words"]


def test_a_tool_call_counts_when_its_result_was_accepted() -> None:
    path = "/v1/chat/completions"
    call = exchange(path, {}, json.dumps(WHOLE[path]).encode())
    answer = json.dumps({"choices": [{"message": {"content": "x"}}], "usage": CHAT_USAGE}).encode()
    accepted, refused = exchange(path, RESULTS[path], answer), exchange(path, RESULTS[path], b"{}", 400)
    done = seen(Outcome({"tool_runs": 1}), steps([call, accepted]), [])
    assert done.connects and done.tools and (done.cached_tokens, done.prompt_tokens) == (4, 9)
    assert not seen(Outcome({}), steps([call, refused]), []).tools
    assert not seen(Outcome({}), steps([call]), []).tools
    assert seen(Outcome({}), [], []).problem == "it sent no request"
    table = markdown([Row(CLIENTS[0], "1|2", done, None).json()])
    assert "| openai | 1\\|2 | chat | yes | not used | yes | 4 exact, 2 put back | 4 of 9 | not run |" in table


def test_every_client_has_a_driver_and_pins_and_a_name_of_its_own() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        assert (DRIVERS / client.driver).is_file() and client.environment.pins.is_file(), client.name
        pins = client.environment.pins.read_text(encoding="utf-8")
        assert f"{client.package}==" in pins or f'"node_modules/{client.package}"' in pins, client.name
    with pytest.raises(ValueError, match="no client is called 'opneai'"):
        chosen(["opneai"])


def test_the_recorder_keeps_what_passes_and_the_fence_lets_nothing_out() -> None:
    with fenced() as (fence, proxy), recording(proxy) as (recorder, url):
        assert httpx.post(f"{url}/v1/messages?beta=true", json={"a": 1}, trust_env=False).status_code == 403
        (kept,) = recorder.take()
        assert (kept.path, kept.status, json.loads(kept.request)) == ("/v1/messages", 403, {"a": 1})
        assert b"nothing outside" in kept.response and recorder.take() == []
        fence.take()
        with pytest.raises(httpx.ProxyError), httpx.Client(proxy=proxy, trust_env=False) as client:
            client.get("https://example.invalid/")
        assert fence.take() == ["example.invalid"]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0
