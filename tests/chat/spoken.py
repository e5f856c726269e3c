"""What K3 says, written as text with marker spellings, and what was parsed from it."""

import json
from typing import Any

from k3_sglang.chat.events import ParsedTurn

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def opened(tag: str) -> str:
    return f"{OPEN}{tag}{SEP}"


def closed(tag: str) -> str:
    return f"{CLOSE}{tag}{SEP}"


def argument(key: str, value: str, kind: str = "string") -> str:
    return opened(f'argument key="{key}" type="{kind}"') + value + closed("argument")


def call(name: str, *arguments: str, index: int = 1) -> str:
    return opened(f'call tool="{name}" index="{index}"') + "".join(arguments) + closed("call")


def tools(*calls: str) -> str:
    return opened("tools") + "".join(calls) + closed("tools")


def arguments_of(turn: ParsedTurn) -> list[dict[str, Any]]:
    return [json.loads(c.arguments) for c in turn.calls]


def complete(turn: ParsedTurn) -> list[bool]:
    return [c.complete for c in turn.calls]
