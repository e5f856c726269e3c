"""Speed of the chat protocol: encoder and parser beside a plain tiktoken encode and SGLang's own K3 detectors.

    python benchmarks/chat.py --vocabulary DIR      # DIR holds tiktoken.model; minutes, most of them SGLang's streaming

Processor time of one thread, best of several runs, at 1,000, 100,000 and 1,000,000 tokens:

- plain: tiktoken over the same text, without structure; the named baseline of every ratio.
- encode: a request of that many tokens to prompt ids, nothing cached; encode again: one more message, with a cache.
- parse: output ids to reasoning, content and calls, at once and one token at a time.
- SGLang: its reasoning and tool detectors over the same output as text (decoding ids to text is not counted), at once
  and one token at a time; a run is stopped at --limit seconds and its share of the output is reported.

SGLang has no encoder of its own for K3: it runs the checkpoint's code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
from rich.console import Console
from rich.table import Table

from k3_sglang import compat
from k3_sglang.chat.encode import encode
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.parse import TurnParser
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import PATTERN, IncrementalDecoder, K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message, ToolCall
from k3_sglang.chat.vocabulary import VOCABULARY_FILE, read_ranks

SIZES = (1_000, 100_000, 1_000_000)
HISTORY_TOKENS = 300_000
MESSAGE_TOKENS = (100, 1_000)
"""Tokens per message of the history that is encoded again: many short steps, or fewer long ones."""
WORDS = "def measure(flow: float) -> str:  # note how much water runs through the channel\n    return f'{flow:.3f}'\n"
WORDS_TOKENS = 28


@dataclass(frozen=True)
class Row:
    """One figure: processor seconds for `tokens` tokens, or for the `share` of them that was reached."""

    tokens: int
    name: str
    seconds: float
    share: float = 1.0


def best(run: Callable[[], object], repetitions: int) -> float:
    """Least processor seconds of several runs."""
    times: list[float] = []
    for _ in range(repetitions):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def text_of(tokens: int, name: str) -> str:
    """Code-like text of about that many tokens that no other call returns."""
    return f"{name}\n" + WORDS * max(1, tokens // WORDS_TOKENS)


def history(tokens: int, message_tokens: int, name: str) -> list[dict[str, Any]]:
    """An agent's session: questions, turns with reasoning and a call, results."""
    messages: list[dict[str, Any]] = []
    for step in range(max(1, tokens // (3 * message_tokens))):
        call_id, label = f"c{step}", f"{name} {step}"
        arguments = json.dumps({"path": f"src/{step}.py", "note": text_of(message_tokens // 2, label)})
        function = {"name": "read_file", "arguments": arguments}
        reasoning = text_of(message_tokens // 2, f"{label} thought")
        messages += (
            {"role": "user", "content": text_of(message_tokens, label)},
            {"role": "assistant", "content": "", "reasoning_content": reasoning,
             "tool_calls": [{"id": call_id, "function": function}]},
            {"role": "tool", "tool_call_id": call_id, "content": text_of(message_tokens, f"{label} result")},
        )  # fmt: skip
    return messages


def encoder_rows(tokenizer: K3Tokenizer, plain: tiktoken.Encoding, tokens: int, repetitions: int) -> list[Row]:
    """The encoder beside a plain encode of the prompt's text."""
    new = [
        parse_request({"messages": history(tokens, min(1_000, tokens // 3), f"encode {number}")})
        for number in range(repetitions + 1)
    ]
    request = new.pop()
    prompt = encode(request, tokenizer)
    text = tokenizer.decode(prompt.ids)
    cache = EncodeCache()
    encode(request, tokenizer, cache)
    more = ChatRequest((*request.messages, Message("user", "And now?")))
    again_s = best(lambda: encode(more, tokenizer, cache), repetitions)
    return [
        Row(len(prompt.ids), "plain tiktoken encode", best(lambda: plain.encode_ordinary(text), repetitions)),
        Row(len(prompt.ids), "encode", best(lambda: encode(new.pop(), tokenizer), repetitions)),
        Row(len(prompt.ids), "encode again, one message more", again_s),
    ]


def spoken(tokenizer: K3Tokenizer, tokens: int) -> list[int]:
    """Output ids of a turn: a third each of reasoning, answer and the string argument of a call."""
    third = tokens // 3
    call = ToolCall("", "write_file", json.dumps({"path": "a.py", "content": text_of(third, "file"), "mode": 420}))
    turn = Message("assistant", text_of(third, "answer"), text_of(third, "thought"), (call,))
    stub = encode(ChatRequest((), effort=None), tokenizer).ids
    whole = encode(ChatRequest((turn,), effort=None, add_generation_prompt=False), tokenizer).ids
    return list(whole[len(stub) :])


def parse(tokenizer: K3Tokenizer, ids: list[int], piece: int) -> None:
    """Our parser over the ids in pieces."""
    parser = TurnParser(tokenizer, start="think")
    for begin in range(0, len(ids), piece):
        parser.feed(ids[begin : begin + piece])
    parser.finish("stop")
    assert parser.turn.calls[0].complete and parser.turn.warnings == ()


def sglang_whole(text: str) -> None:
    """SGLang's two detectors over the whole text."""
    thought = compat.resolve("KimiK3ReasoningDetector")().detect_and_parse(text)
    found = compat.resolve("KimiK3ToolDetector")().detect_and_parse(thought.normal_text, [])
    assert len(found.calls) == 1


def sglang_stream(pieces: list[str], limit_s: float) -> tuple[float, float]:
    """SGLang's two detectors fed piece by piece: processor seconds, and the share of the pieces taken until then."""
    reasoning, tools = compat.resolve("KimiK3ReasoningDetector")(), compat.resolve("KimiK3ToolDetector")()
    start = time.process_time()
    for place, piece in enumerate(pieces):
        answer = reasoning.parse_streaming_increment(piece).normal_text
        if answer:
            tools.parse_streaming_increment(answer, [])
        if place % 64 == 0 and time.process_time() - start > limit_s:
            return time.process_time() - start, place / len(pieces)
    return time.process_time() - start, 1.0


def parser_rows(
    tokenizer: K3Tokenizer, plain: tiktoken.Encoding, tokens: int, repetitions: int, limit_s: float
) -> list[Row]:
    """The parser beside a plain encode of the same text and SGLang's detectors."""
    ids = spoken(tokenizer, tokens)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.feed([token]) for token in ids]
    text = "".join(pieces)
    streamed_s, share = sglang_stream(pieces, limit_s)
    return [
        Row(len(ids), "plain tiktoken encode of the output", best(lambda: plain.encode_ordinary(text), repetitions)),
        Row(len(ids), "parse at once", best(lambda: parse(tokenizer, ids, len(ids)), repetitions)),
        Row(len(ids), "parse token by token", best(lambda: parse(tokenizer, ids, 1), repetitions)),
        Row(len(ids), "SGLang at once", best(lambda: sglang_whole(text), repetitions)),
        Row(len(ids), "SGLang token by token", streamed_s, share),
    ]


def again_rows(tokenizer: K3Tokenizer, repetitions: int) -> list[Row]:
    """A 300,000-token history and one new message, read from a new request body each time, as a server does."""
    rows: list[Row] = []
    for message_tokens in MESSAGE_TOKENS:
        messages = history(HISTORY_TOKENS, message_tokens, "again")
        cache = EncodeCache()
        encode(parse_request({"messages": messages}), tokenizer, cache)
        times: list[float] = []
        length = 0
        for step in range(repetitions + 2):
            body = {"messages": [*messages, {"role": "user", "content": f"New question {step}"}]}
            request = parse_request(json.loads(json.dumps(body)))
            start = time.process_time()
            length = len(encode(request, tokenizer, cache).ids)
            times.append(time.process_time() - start)
        name = f"history of {len(messages)} messages, one new turn"
        rows.append(Row(length, name, min(times)))
    return rows


def show(rows: list[Row]) -> None:
    """Print the table; the last column is the time per token in units of the plain encode above."""
    table = Table(title="processor time of one thread")
    for column in ("tokens", "what", "ms", "tokens/s", "time / plain"):
        table.add_column(column, justify="left" if column == "what" else "right")
    plain_rate = 0.0
    for row in rows:
        rate = row.tokens * row.share / row.seconds
        plain_rate = rate if row.name.startswith("plain") else plain_rate
        name = row.name if row.share == 1 else f"{row.name} (stopped after {row.share:.1%})"
        table.add_row(f"{row.tokens:,}", name, f"{row.seconds * 1e3:,.2f}", f"{rate:,.0f}", f"{plain_rate / rate:.3f}")
    Console(width=120).print(table)


def main() -> int:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, required=True, help="folder with tiktoken.model")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of which the best counts (default: 5)")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one streamed run of SGLang (default: 60)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tokens (default: 1000 100000 1000000)")
    options = parser.parse_args()
    tokenizer = K3Tokenizer.from_dir(options.vocabulary)
    ranks = read_ranks(options.vocabulary / VOCABULARY_FILE)
    plain = tiktoken.Encoding("plain", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    rows: list[Row] = []
    for tokens in options.sizes:
        rows += encoder_rows(tokenizer, plain, tokens, options.repetitions)
        rows += parser_rows(tokenizer, plain, tokens, options.repetitions, options.limit)
    show([*rows, *again_rows(tokenizer, options.repetitions)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
