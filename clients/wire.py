"""What recorded exchanges say in any of the protocols: streams, calls and their results, usage, verdicts, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from clients.recorder import Exchange

GENERATING = re.compile(r"/(chat/completions|responses|messages)$")
"""Paths that make the model write."""
OK = 200
ERROR_CHARS = 200
VERDICTS = ("exact", "repaired", "missing", "foreign")

Json = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One request that made the model write."""

    path: str
    status: int
    streamed: bool
    complete: bool
    """Whether the answer came to its end."""
    calls: frozenset[str]
    """Ids of the calls in the answer."""
    results: frozenset[str]
    """Ids of the calls that the request has results for."""
    prompt_tokens: int
    cached_tokens: int
    turns: Json = field(default_factory=dict)
    """Verdict of the gateway -> turns of the history with it; empty without a gateway and for the first turn."""
    error: str = ""


def steps(exchanges: Sequence[Exchange]) -> list[Step]:
    """Every exchange that made the model write, or should have."""
    return [_step(one) for one in exchanges if one.method == "POST" and GENERATING.search(one.path)]


def _step(exchange: Exchange) -> Step:
    streamed = exchange.headers.get("content-type", "").startswith("text/event-stream")
    events = list(_events(exchange.response) if streamed else _whole(exchange.response))
    prompt_tokens, cached_tokens = _usage(events)
    failure = next((event["error"] for event in events if event.get("error")), None)
    if exchange.status != OK and failure is None:
        failure = exchange.response.decode(errors="replace")
    return Step(
        path=exchange.path,
        status=exchange.status,
        streamed=streamed,
        complete=_complete(exchange, events, streamed),
        calls=frozenset(_calls(events)),
        results=frozenset(_results(exchange.request)),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        turns=_verdicts(exchange.headers.get("x-k3-replay", "")),
        error="" if failure is None else f"{exchange.status}: {_text_of(failure)[:ERROR_CHARS]}",
    )


def _complete(exchange: Exchange, events: Sequence[Json], streamed: bool) -> bool:
    if not streamed:
        return exchange.status == OK and bool(events)
    last = {"message_stop", "response.completed", "response.incomplete"}
    return b"data: [DONE]" in exchange.response or any(event.get("type") in last for event in events)


def _events(stream: bytes) -> Iterator[Json]:
    for line in stream.decode(errors="replace").split("\n"):
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield from _whole(data.encode())


def _whole(body: bytes) -> Iterator[Json]:
    try:
        value = json.loads(body)
    except ValueError:
        return  # cut off, or no JSON: what is missing shows in the figures
    if isinstance(value, dict):
        yield value


def _usage(events: Sequence[Json]) -> tuple[int, int]:
    """Prompt tokens and the cached ones among them; the last word of a stream counts."""
    prompt_tokens = cached_tokens = 0
    for event in events:
        holders = (event, event.get("message"), event.get("response"))
        for usage in (holder.get("usage") for holder in holders if isinstance(holder, dict)):
            if not isinstance(usage, dict):
                continue
            if "cache_read_input_tokens" in usage:
                cached_tokens = usage["cache_read_input_tokens"] or 0
                created = usage.get("cache_creation_input_tokens") or 0
                prompt_tokens = (usage.get("input_tokens") or 0) + created + cached_tokens or prompt_tokens
                continue
            prompt_tokens = usage.get("prompt_tokens") or usage.get("input_tokens") or prompt_tokens
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            cached_tokens = details.get("cached_tokens") or cached_tokens
        cache = (event.get("k3") or {}).get("cache") or {}
        cached_tokens = cache.get("cached_tokens") or cached_tokens  # streams that were not asked for usage
    return prompt_tokens, cached_tokens


def _calls(events: Sequence[Json]) -> Iterator[str]:
    for event in events:
        for choice in event.get("choices") or ():
            said = choice.get("message") or choice.get("delta") or {}
            yield from (call["id"] for call in said.get("tool_calls") or () if call.get("id"))
        blocks = [*(event.get("content") or ()), event.get("content_block") or {}]
        yield from (block["id"] for block in blocks if isinstance(block, dict) and block.get("type") == "tool_use")
        answered = event if event.get("object") == "response" else event.get("response") or {}
        items = [*(answered.get("output") or ()), event.get("item") or {}]
        yield from (item["call_id"] for item in items if item.get("type") == "function_call")


def _results(request: bytes) -> Iterator[str]:
    for body in _whole(request):
        spoken = body.get("messages") or body.get("input") or ()
        for message in (one for one in spoken if isinstance(one, dict)):
            if message.get("role") == "tool":
                yield str(message.get("tool_call_id"))
            elif message.get("type") == "function_call_output":
                yield str(message.get("call_id"))
            blocks = message.get("content")
            for block in blocks if isinstance(blocks, list) else ():
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    yield str(block.get("tool_use_id"))


def _verdicts(header: str) -> Json:
    """``repaired; exact=3; repaired=1; ...`` as counts, without the zeros."""
    counts = dict(re.findall(r"(\w+)=(\d+)", header))
    return {name: int(counts[name]) for name in VERDICTS if int(counts.get(name, 0))}


def _text_of(error: object) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or error).split())
