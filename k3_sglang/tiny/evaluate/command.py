"""The command ``python -m k3_sglang.tiny eval``: skills side by side, a table, and a file with every case."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

from rich.console import Console

from agent_runtime.engine.chat_errors import ChatError
from agent_runtime.engine.openai_chat import ChatClient, ChatSettings
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.evaluate.compressing import compress
from k3_sglang.tiny.evaluate.following import MAKERS, follow
from k3_sglang.tiny.evaluate.outcome import Case, rates, report, table
from k3_sglang.tiny.evaluate.recalling import recall
from k3_sglang.tiny.evaluate.repairing import repair

Evaluate: TypeAlias = Callable[[ChatClient, ChatClient, Draw], Awaitable[Case]]

EXPLAINED: Final = {
    "tools: call": "the right tool with exactly the right arguments; one for each turn with a call",
    "tools: calls side by side": "both calls of one turn, in order",
    "tools: whole conversation": "one to four turns, every call and answer of them",
    "review: answer": "the wrong line and the right one, of a function that the user shows",
    "tools: answer": "the answer word for word, from the result",
    "facts, thinking kept: all": "the secret of its own earlier thinking",
    "facts, thinking put back: all": "the client dropped it, the gateway restored it",
    "facts, thinking dropped: all": "guessed: the thinking is gone",
    "facts, thinking foreign: all": "guessed: the thinking is another conversation's",
    "facts, thinking dropped: choice of a list": "chance is 1 in 4 to 8",
    "facts, thinking dropped: number": "chance is 1 in 90",
    "coding: bug fixed": "the tests pass, nothing but the module has changed",
    "compression: all facts recalled after it": "two to four facts, one question each",
}
_ANSWER_TOKENS: Final = 700
_LINES: Final = 20
"""Lines of progress."""


def _following(skill: str) -> Evaluate:
    return lambda greedy, _, draw: follow(greedy, skill, draw)


SKILLS: Final[Mapping[str, Evaluate]] = {
    **{skill: _following(skill) for skill in MAKERS},
    "facts": recall,
    "compression": lambda greedy, _, draw: compress(greedy, draw),
    "coding": lambda greedy, _, draw: repair(greedy, draw),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--endpoint", required=True, metavar="URL", help="for example http://127.0.0.1:30000/v1")
    parser.add_argument("--skills", nargs="+", choices=sorted(SKILLS), default=list(SKILLS), metavar="SKILL")
    parser.add_argument("--count", type=_positive, default=100, help="cases of each skill (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other cases")
    parser.add_argument("--concurrency", type=_positive, default=4, help="cases at a time (default: 4)")
    parser.add_argument("--out", type=Path, help="JSON file for figures, every case and what the model wrote")


def run(options: argparse.Namespace) -> int:
    """Evaluate and print; 0 when all cases were run, 1 when the endpoint failed one of them."""
    started = time.monotonic()
    total = options.count * len(options.skills)
    try:
        cases = asyncio.run(evaluate(options, Progress(total, sys.stderr)))
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    every = [case for group in cases.values() for case in group]
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(rates(every), EXPLAINED))
    failed = [case for case in every if not case.verdicts]
    console.print(f"{len(every)} cases in {seconds:.0f} s, {len(failed)} of them failed by the endpoint")
    head = {"endpoint": options.endpoint, "seed": options.seed, "count": options.count, "seconds": round(seconds, 1)}
    found = report(head, cases)
    console.print(f"greedy outputs, sha256: {found['greedy_sha256']}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for case in failed[:3]:
        print(f"error: {case.problem}", file=sys.stderr)
    return 1 if failed else 0


class Progress:
    """A line for every twentieth of the cases."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total, self._out, self._done = total, out, 0
        self._started = time.monotonic()

    def one_done(self) -> None:
        """Another case is over."""
        before, self._done = self._done, self._done + 1
        if before * _LINES // self._total < self._done * _LINES // self._total:
            seconds = time.monotonic() - self._started
            print(f"{self._done} of {self._total} cases, {seconds:.0f} s", file=self._out, flush=True)


async def evaluate(options: argparse.Namespace, progress: Progress | None = None) -> dict[str, list[Case]]:
    """Cases by skill, in their order. Raises ChatError when the endpoint does not answer at all."""
    plain: dict[str, Any] = {"max_output_tokens": _ANSWER_TOKENS}
    room = asyncio.Semaphore(options.concurrency)
    async with (
        ChatClient(options.endpoint, settings=ChatSettings(**plain, temperature=0.0)) as greedy,
        ChatClient(options.endpoint, settings=ChatSettings(**plain, temperature=1.0, top_p=1.0)) as sampled,
    ):
        await greedy.models()

        async def one(skill: str, number: int) -> Case:
            draw = Draw(f"eval/{options.seed}/{skill}/{number}", "held_out")
            async with room:
                try:
                    return await SKILLS[skill](greedy, sampled, draw)
                except ChatError as error:
                    return Case(problem=f"{skill} {number}: {error}")
                finally:
                    if progress is not None:
                        progress.one_done()

        jobs = {skill: [one(skill, number) for number in range(options.count)] for skill in options.skills}
        done = await asyncio.gather(*(asyncio.gather(*group) for group in jobs.values()))
        return dict(zip(jobs, done, strict=True))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is too small; at least 1")
    return value
