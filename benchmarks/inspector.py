"""What the inspector costs: time and memory per step of the gateway, and time to make a page of each kind."""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from agent_runtime.inspector.facts import CameBack, StepFacts
from agent_runtime.inspector.html import Html
from agent_runtime.inspector.layout import Site
from agent_runtime.inspector.log import StepLog
from agent_runtime.inspector.reading import turn_facts
from agent_runtime.inspector.sessions_page import session_page, sessions_page
from agent_runtime.inspector.structure import blocks, call_tokens
from k3_sglang.chat.encode import encode
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Message, ToolCall

REPEATS = 5
SITE = Site("k3", content=True, max_steps=10_000, has_ledger=False)


def step(log: StepLog, number: int, sessions: int) -> None:
    """All that a request writes: its coming, its first token, its turn, its end."""
    counts = {"exact": number, "repaired": 0, "missing": 0, "foreign": 0}
    log.add(
        StepFacts(
            id=number,
            session=number % sessions,
            name=f"session:{number % sessions}",
            is_conversation=True,
            parent=number,
            created_ms=number,
            form="chat",
            encoded_tokens=10_000 + number,
            replay={"verdict": "exact", **counts, "prefix": {"holds": True}},
            came_back=CameBack(number, "exact", None),
            running=True,
        )
    )
    log.began(number, number + 100, 10_000)
    made = turn_facts(
        number, 0, number, prompt_tokens=10_000 + number, cached_tokens=10_000, output_tokens=500, think_tokens=200,
        call_tokens=100, finish="stop",
    )  # fmt: skip
    log.turn(number, made)
    log.ended(number, number + 200)


def best_ms(make: Callable[[], object]) -> float:
    """The fastest of some runs."""
    times: list[float] = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        make()
        times.append(time.perf_counter() - start_s)
    return 1000 * min(times)


def page_line(name: str, make: Callable[[], Html]) -> str:
    """Time and size of a page."""
    return f"{name:<44}{best_ms(make):8.1f} ms {len(make()) / 1000:8.0f} kB"


def turn(tokenizer: K3Tokenizer, calls: int) -> Sequence[int]:
    """Ids of a turn with some calls."""
    made = tuple(ToolCall(str(place), "read_file", '{"path": "scores.py", "lines": 40}') for place in range(calls))
    message = Message("assistant", "I look. " * 40, "Where is it? " * 40, made)
    return encode(ChatRequest((message,), add_generation_prompt=False), tokenizer).ids


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=Path, required=True, help="folder that holds tiktoken.model")
    parser.add_argument("--steps", type=int, default=10_000, help="steps that are kept")
    options = parser.parse_args()
    steps: int = options.steps
    tracemalloc.start()
    log = StepLog(steps)
    for number in range(steps):
        step(log, number, 100)
    print(f"{'memory of a step':<44}{tracemalloc.get_traced_memory()[0] / steps:8.0f} bytes")
    tracemalloc.stop()
    started_s = time.perf_counter()
    for number in range(steps, 2 * steps):
        step(log, number, 100)
    print(f"{'a step':<44}{1e6 * (time.perf_counter() - started_s) / steps:8.1f} µs")
    tokenizer = K3Tokenizer.from_dir(options.vocabulary)
    ids = turn(tokenizer, 4)
    counting_ms = best_ms(lambda: call_tokens(ids, tokenizer))
    print(f"{f'counting the calls of {len(ids)} output tokens':<44}{1000 * counting_ms:8.1f} µs")
    prompt = list(ids) * (1_000_000 // len(ids))
    print(f"{'finding the messages of 1,000,000 tokens':<44}{best_ms(lambda: blocks(prompt, tokenizer)):8.1f} ms")
    print(page_line("page of 50 sessions", lambda: sessions_page(SITE, log, 1)))
    one = StepLog(steps)
    for number in range(steps):
        step(one, number, 1)
    session = one.session(0)
    assert session is not None
    print(page_line(f"page of a session of {steps:,} steps", lambda: session_page(SITE, session, None)))


if __name__ == "__main__":
    main()
