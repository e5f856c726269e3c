"""A session whose every byte is determined, and a program that runs it and kills it with SIGKILL at random moments."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_runtime.compression.trigger import CompressionSettings
from agent_runtime.conversation import AssistantTurn, Message, Usage
from agent_runtime.engine.chat_errors import StreamBroken
from agent_runtime.events import RunResult
from agent_runtime.limits import Limits, Retries
from agent_runtime.loop import Agent, AgentOptions
from agent_runtime.replay import replay
from agent_runtime.resume import recover
from agent_runtime.runstore import Entry, FileRunStore, RunStore, read_run_log
from agent_runtime.tools.registry import ToolRegistry, tool
from tests.agent.scripted_model import Seen, is_summary, turn

STEPS = 8
TASK = "do all of it"


class DeterminedModel:
    """Answers from what it is sent alone, as a model at temperature 0 does; fails once, at the third step."""

    def __init__(self) -> None:
        self.failed = False

    async def complete(
        self, messages: Any, tools: Any = (), *, options: Any = None, on_delta: Any = None
    ) -> AssistantTurn:
        await asyncio.sleep(0)
        if is_summary(Seen(tuple(messages), (), options)):
            return turn(f"SUMMARY at {_done(messages)}", usage=Usage(50, 5, 40))
        step = _done(messages)
        if step == 2 and not self.failed:
            self.failed = True
            raise StreamBroken("once")
        usage = Usage(100 + 40 * len(messages), 10, 90)
        if step >= STEPS:
            return turn("all done", reasoning=f"thought {step}", usage=usage)
        calls = (("read", json.dumps({"step": step})), ("write", json.dumps({"step": step})), ("read", '{"step": -1}'))
        return turn("", *calls, reasoning=f"thought {step}", usage=usage, ids=f"s{step}-")


def _done(messages: tuple[Message, ...]) -> int:
    """Steps behind this history, those in the summary included."""
    done = 0
    for message in messages:
        text = str(message.content)
        if message.role == "user" and "SUMMARY at " in text:
            done = int(text.rsplit("SUMMARY at ", 1)[1].split()[0])
        done += message.role == "assistant"
    return done


def registry(effects: Path) -> ToolRegistry:
    """A tool that reads and one that changes something outside, which a second time would show."""

    @tool
    async def read(step: int) -> str:
        """Reads.

        Args:
            step: Which.
        """
        await asyncio.sleep(0)
        return f"read {step}"

    @tool(parallel=False)
    async def write(step: int) -> str:
        """Writes.

        Args:
            step: Which.
        """
        with effects.open("a") as file:
            file.write(f"{step}\n")
        await asyncio.sleep(0)
        return f"wrote {step}"

    return ToolRegistry([read, write])


async def go_on(store: RunStore, effects: Path) -> RunResult:
    """Begin the session, or go on with it from wherever its log ends."""
    limits = Limits(max_steps=STEPS + 1, retries=Retries(backoff_s=0.0))
    # The window of a run with 8 steps is compressed once.
    options = AgentOptions(CompressionSettings(trigger_tokens=700, backoff_s=0.0), session="crash")
    tools = registry(effects)
    if not store.entries():
        agent = Agent(DeterminedModel(), tools, "be good", limits=limits, store=store, options=options)
    else:
        agent = Agent.resume(DeterminedModel(), tools, store, limits=limits, options=options)
    if agent.unfinished:
        return await agent.proceed()
    return await agent.run(TASK)


def check_log(entries: Sequence[Entry]) -> None:
    """A log that ends anywhere is whole: every request comes out of it byte for byte, every call has one result.

    Raises:
        AssertionError: it is not.
    """
    requests = list(replay(entries))
    assert all(request.exact for request in requests)
    bytes_of: dict[str, str] = {}
    for request in requests:
        text = json.dumps(request.messages)
        key = f"{request.purpose} {request.messages[0]} {len(request.messages)} {'SUMMARY' in text}"
        assert bytes_of.setdefault(key, text) == text, "the same step was asked for in other bytes"
    state = recover(entries)
    results = [message["tool_call_id"] for message in logged(entries) if message["role"] == "tool"]
    assert len(results) == len(set(results)) and set(results) <= set(state.calls)


def logged(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Messages of a log, in order."""
    return [entry["message"] for entry in entries if entry["kind"] in ("message", "run")]


def crash(folder: Path, wanted: int, seed: int) -> dict[str, int]:
    """Run sessions in children that are killed, until so many were.

    Counts kills, sessions, and calls that were interrupted so that nobody knows whether they took effect.
    """
    chance = random.Random(seed)
    kills = sessions = interrupted = 0
    whole_s = 0.0
    while kills < wanted:
        log, effects = folder / f"{sessions}.jsonl", folder / f"{sessions}.txt"
        while True:
            started = time.monotonic()
            child = os.fork()
            if child == 0:
                with FileRunStore(log) as store:
                    asyncio.run(go_on(store, effects))
                os._exit(0)
            if whole_s:
                time.sleep(chance.uniform(0, whole_s))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, f"session {sessions} failed"
                whole_s = whole_s or time.monotonic() - started
                break
            kills += 1
            if log.exists() and (entries := read_run_log(log)):
                check_log(entries)
        entries = read_run_log(log)
        check_log(entries)
        assert recover(entries).status == "completed"
        interrupted += sum(str(m.get("content")).startswith("Interrupted") for m in logged(entries))
        written = effects.read_text().split()
        assert len(written) == len(set(written)), f"session {sessions} wrote twice: {written}"
        sessions += 1
    return {"kills": kills, "sessions": sessions, "interrupted": interrupted}


def main() -> None:
    """`crash` with the arguments folder, kills and seed; prints the counts as JSON."""
    print(json.dumps(crash(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))


if __name__ == "__main__":
    main()
