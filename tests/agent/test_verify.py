"""The public check of preserved thinking: it must see every way in which thinking is lost."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from agent_runtime.verify import TOOL, Asked, Report, verify
from k3_sglang.chat.encode import encode
from k3_sglang.chat.request import parse_request
from tests.gateway.conftest import Running, engine_url, gateway, keys, settings, stub, tokenizer, writer
from tests.gateway.vocabulary import byte_tokenizer

__all__ = ["engine_url", "gateway", "keys", "settings", "stub", "tokenizer", "writer"]

TOKENIZER = byte_tokenizer()
JSON = dict[str, Any]


def thinking(message: JSON) -> str:
    return str(message.get("reasoning_content") or "")


def prompt_tokens(messages: list[JSON], tools: list[JSON]) -> int:
    return len(encode(parse_request({"messages": messages, "tools": tools}), TOKENIZER).ids)


class Server:
    """An endpoint that does something to the thinking of a history before it renders it."""

    def __init__(self, change: Any = lambda messages: messages) -> None:
        self.change = change
        self.asked = 0

    async def ask(self, messages: list[JSON], tools: list[JSON], limit: int) -> Asked:
        self.asked += 1
        assert tools == [TOOL] and limit >= 16
        seen = self.change(json.loads(json.dumps(messages)))
        recalled = " ".join(word for message in seen for word in thinking(message).split() if word.isdigit())
        return Asked(prompt_tokens(seen, tools), recalled)


async def checked(change: Any = lambda messages: messages) -> Report:
    return await verify(Server(change).ask, count=lambda text: len(TOKENIZER.encode_text(text)))


def without(keep: Any) -> Any:
    """Drops the thinking of assistant messages that `keep` does not want."""

    def change(messages: list[JSON]) -> list[JSON]:
        last_user = max(n for n, message in enumerate(messages) if message["role"] == "user")
        for n, message in enumerate(messages):
            if "reasoning_content" in message and not keep(n, message, last_user):
                del message["reasoning_content"]
        return messages

    return change


async def test_an_endpoint_that_keeps_thinking_is_found_to_keep_it_to_the_token() -> None:
    report = await checked()
    assert report.verdict == "preserved" and all(p.exact and p.kept and p.recalled for p in report.places)
    assert report.additive and report.guessed == 0 and not report.missing_refused


@pytest.mark.parametrize(
    ("keep", "verdict", "kept"),
    [
        (lambda n, message, last_user: False, "dropped", [False, False, False]),
        (lambda n, message, last_user: "tool_calls" in message, "partly", [False, True, False]),
        (lambda n, message, last_user: n > 2, "partly", [False, True, True]),
    ],
    ids=["all", "all-but-calls", "first-turn"],
)
async def test_thinking_that_is_dropped_is_found(keep: Any, verdict: str, kept: list[bool]) -> None:
    report = await checked(without(keep))
    assert report.verdict == verdict and [place.kept for place in report.places] == kept
    assert [place.recalled for place in report.places] == kept


async def test_thinking_that_is_shortened_is_found_with_the_tokenizer() -> None:
    def shorten(messages: list[JSON]) -> list[JSON]:
        for message in messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = message["reasoning_content"][:10]
        return messages

    report = await checked(shorten)
    assert report.verdict == "partly" and [place.exact for place in report.places] == [False] * 3


async def test_thinking_copied_from_the_latest_turn_is_found() -> None:
    """Case 5: gaps filled with another turn's thinking. Dropping one then saves nothing."""

    def copy(messages: list[JSON]) -> list[JSON]:
        latest = next((thinking(m) for m in reversed(messages) if thinking(m)), "")
        for message in messages:
            if message["role"] == "assistant" and not thinking(message):
                message["reasoning_content"] = latest
        return messages

    report = await checked(copy)
    assert report.verdict == "dropped" and report.additive is False


async def test_an_endpoint_that_refuses_or_does_not_count_is_unknown() -> None:
    async def refuses(messages: list[JSON], tools: list[JSON], limit: int) -> Asked:
        return Asked(None, "", "unknown field reasoning_content")

    async def silent(messages: list[JSON], tools: list[JSON], limit: int) -> Asked:
        return Asked(None, "")

    refused = await verify(refuses)
    assert refused.verdict == "unknown" and refused.refusal == "unknown field reasoning_content"
    assert (await verify(silent)).verdict == "unknown"


async def test_an_endpoint_that_refuses_missing_thinking_is_told_so() -> None:
    async def strict(messages: list[JSON], tools: list[JSON], limit: int) -> Asked:
        if not any(thinking(message) for message in messages):
            return Asked(None, "", "thinking is missing")
        return await Server().ask(messages, tools, limit)

    assert (await verify(strict)).missing_refused


async def test_the_command_against_the_real_gateway_says_preserved(gateway: Running, repository: Any) -> None:
    """A process of its own, as a user runs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agent_runtime",
        "verify",
        f"{gateway.url}/v1",
        "--json",
        stdout=subprocess.PIPE,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository), "NO_PROXY": "*"},
    )
    out, _ = await process.communicate()
    report = json.loads(out)
    assert process.returncode == 0 and report["verdict"] == "preserved", report
    assert all(place["tokens"] > 40 for place in report["places"]), "one token per byte"
    assert report["other_key"] in (True, False)
