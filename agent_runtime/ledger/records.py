"""What the ledger stores: a step (one request) and a turn (one output), and their JSON."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agent_runtime.ledger.turns import KnownTurn, TurnKeys
from k3_sglang.chat.types import Message, ToolCall

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One request: its body as received, the ids it became, and what was found about its history.

    ``owner`` is whose key it came with, "" without keys; a session has one owner.
    ``facts`` is JSON: ``replay`` (the verdicts) and ``engine`` (per choice, what the engine was asked beside the ids).
    """

    id: int
    session: int
    name: str
    parent: int | None
    created_ms: int
    body: bytes
    ids: Sequence[int]
    prompt_tokens: int
    facts: Mapping[str, Any]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One output of a step: the turn, all its ids (also of one that is not whole), and its finish and usage."""

    turn: KnownTurn
    step: int
    choice: int
    created_ms: int
    ids: tuple[int, ...]
    facts: Mapping[str, Any]


def message_bytes(message: Message) -> bytes:
    """A delivered message, compressed."""
    calls = [[call.id, call.name, call.arguments, *filter(None, [call.upstream_id])] for call in message.tool_calls]
    value = {"content": message.content, "reasoning": message.reasoning, "calls": calls}
    return zlib.compress(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def message_from(data: bytes) -> Message:
    """The message that `message_bytes` wrote."""
    value = cast("dict[str, Any]", json.loads(zlib.decompress(data).decode("utf-8", "surrogatepass")))
    calls = tuple(ToolCall(*call) for call in value["calls"])
    return Message("assistant", value["content"], value["reasoning"], calls)


def keys_bytes(keys: TurnKeys) -> bytes:
    """Digests one after the other."""
    return b"".join((keys.before, keys.chain, keys.loose, keys.between, keys.local, keys.visible, keys.tools))


def keys_from(data: bytes) -> TurnKeys:
    """The digests that `keys_bytes` wrote."""
    return TurnKeys(*(data[place : place + KEY_BYTES] for place in range(0, 7 * KEY_BYTES, KEY_BYTES)))
