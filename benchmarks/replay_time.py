"""Time that checking a history of 300,000 tokens against the record adds to encoding it.

    python benchmarks/replay_time.py --vocabulary DIR      # DIR holds tiktoken.model; half a minute

The client has lost all thinking, so every turn is repaired. Processor time of one thread, best of several requests;
each has new strings, as one from the wire has, and the encoder's memory is warm, as in a session.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_runtime.guard.history import Scope
from agent_runtime.guard.prompt import HistoryGuard
from agent_runtime.ledger.turns import TurnIndex
from k3_sglang.chat.encode import encode
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message, ToolCall
from k3_sglang.tiny.checkpoint import ensure

HISTORY_TOKENS = 300_000
MESSAGE_TOKENS = (150, 500, 1500)


def long_history(steps: int, message_tokens: int) -> list[Message]:
    """An agent's session: a question, then turns with thinking and a call, and results; about so many tokens each."""
    words = "how much water runs through the channel, and is it more than we measured before? "
    text = words * max(1, message_tokens // 18)
    messages = [Message("user", text)]
    for step in range(steps):
        call = ToolCall(f"call_{step:024x}", "read", json.dumps({"path": f"src/{step}.py", "note": f"{step} {words}"}))
        thought = f"{step} thought {text[: len(text) // 2]}"
        messages.append(Message("assistant", f"{step} {text[: len(text) // 4]}", thought, (call,)))
        messages.append(Message("tool", f"{step} result {text}", tool_call_id=call.id, name="read"))
    return messages


def added_ms(vocabulary: Path, message_tokens: int, repetitions: int = 7) -> tuple[int, int, float, float]:
    """Messages, prompt tokens, milliseconds that the guard adds to encoding (at best), and those of encoding alone."""
    tokenizer = K3Tokenizer.from_dir(vocabulary)
    guard = HistoryGuard(TurnIndex(10_000_000, 100_000))
    cache = EncodeCache()
    one = len(encode(ChatRequest(tuple(long_history(1, message_tokens)[1:])), tokenizer).ids)
    messages = long_history(HISTORY_TOKENS // one, message_tokens)
    for place, message in enumerate(messages):
        if message.role == "assistant":
            built = guard.build(ChatRequest(tuple(messages[:place])), Scope("s"), tokenizer, cache)
            ids = encode(ChatRequest((message,), effort=None, add_generation_prompt=False), tokenizer).ids[8:]
            guard.record(built, place, 1, message, ids, whole=True)
    whole: list[float] = []
    alone: list[float] = []
    tokens = 0
    for _ in range(repetitions):
        request = ChatRequest(tuple(map(reread, messages)))
        start = time.process_time()
        built = guard.build(request, Scope("s"), tokenizer, cache)
        whole_s = time.process_time() - start
        assert built.replay.verdict == "repaired"
        tokens = built.prompt_tokens
        told = replace(built.request, messages=tuple(map(reread, built.request.messages)))
        start = time.process_time()
        encode(told, tokenizer, cache)
        encode_s = time.process_time() - start
        whole.append(1000 * whole_s)
        alone.append(1000 * encode_s)
    return len(messages), tokens, min(whole) - min(alone), min(alone)


def reread(message: Message) -> Message:
    """The same message in strings of its own, its thinking lost."""

    def fresh(text: str) -> str:
        return (text + " ")[:-1]

    calls = tuple(ToolCall(fresh(c.id), fresh(c.name), fresh(c.arguments)) for c in message.tool_calls)
    return replace(message, content=fresh(str(message.content)), reasoning=None, tool_calls=calls)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, default=ensure(), help="default: the tiny model's")
    options = parser.parse_args()
    table = Table(title="time per request")
    for column in ("tokens per message", "messages", "prompt tokens", "guard adds, ms", "encoding, ms"):
        table.add_column(column, justify="right")
    for size in MESSAGE_TOKENS:
        messages, tokens, added, alone = added_ms(options.vocabulary, size)
        table.add_row(str(size), str(messages), str(tokens), f"{added:.1f}", f"{alone:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
