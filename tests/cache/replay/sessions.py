"""Builders of sessions for the tests of the replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from k3_sglang.cache.replay.schedule import Pacing, Step, make_steps
from k3_sglang.cache.replay.traces import BLOCK_TOKENS, Request, Session, Stream, Trace

Turn = tuple[Sequence[int], int]
"""Block ids of a prompt, output tokens."""


def session(name: str, turns: Sequence[Turn], *, head: tuple[int, int] = (0, 0), every_s: float = 10.0) -> Session:
    """A session with one stream; prompts are whole blocks, a request every ``every_s`` seconds."""
    requests: list[Request] = []
    for number, (blocks, output) in enumerate(turns):
        ids = np.asarray(blocks, np.int32)
        before = requests[-1].blocks if requests else ids[:0]
        equal = [one == other for one, other in zip(before, ids, strict=False)]
        shared = equal.index(False) if False in equal else len(equal)
        requests.append(Request(number * every_s, len(ids) * BLOCK_TOKENS, output, ids, shared, 1.0))
    return Session(name, (Stream(name, sum(head), head, tuple(requests)),))


def steps_of(*sessions: Session, concurrent: int = 1, serial: bool = True) -> list[Step]:
    """The sessions as a load; with one open session they follow each other in the order of the draw."""
    return make_steps(Trace("sessions", sessions, shared_ids=False), Pacing(concurrent, serial=serial))


def growing(turns: int, *, start: int = 20, grow: int = 10, output: int = 320, first_id: int = 0) -> list[Turn]:
    """Turns whose prompts extend each other by ``grow`` blocks, the answer included."""
    return [(range(first_id, first_id + start + turn * grow), output) for turn in range(turns)]


def encoded(
    name: str, prompts: Sequence[Sequence[int]], tails: Sequence[int], *, outputs: Sequence[int]
) -> dict[str, Any]:
    """A line of the session format: prompts as kept blocks and runs, each with a partial last block of ``tails``."""
    entries: list[dict[str, Any]] = []
    before: Sequence[int] = ()
    for number, (blocks, tail, output) in enumerate(zip(prompts, tails, outputs, strict=True)):
        keep = 0
        while keep < min(len(before), len(blocks)) and before[keep] == blocks[keep]:
            keep += 1
        runs: list[list[int]] = []
        for block in blocks[keep:]:
            if runs and runs[-1][0] + runs[-1][1] == block:
                runs[-1][1] += 1
            else:
                runs.append([block, 1])
        entries.append(
            {
                "t": 10.0 * number,
                "input": len(blocks) * BLOCK_TOKENS + tail,
                "output": output,
                "keep": keep,
                "new": runs,
                "think": 0.0,
                "api": 1.0,
                "stop": "tool_use",
            }
        )
        before = blocks
    return {"id": name, "block_size": BLOCK_TOKENS, "tool_tokens": 0, "system_tokens": 0, "requests": entries}
