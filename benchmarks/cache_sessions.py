"""Scripted agent sessions for the cache benchmarks: forks, tool waits, compressions and closes, all from one seed.

Every token is scripted, the answers included, so that two engines are given exactly the same prompts in the same order.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_common import VOCABULARY

from k3_sglang.cache.hints import PARAMETER
from k3_sglang.cache.replay.tree import Tree

COMPRESS_ABOVE = 2200
"""Tokens of history from which a session replaces it by a summary."""


@dataclass(eq=False)
class Step:
    """One request."""

    session: str
    moment: float
    """When it is due, in scripted time: one unit per request and the waits for tools and users."""
    prompt: list[int]
    answer: list[int]
    kind: str
    """``open``, ``turn``, ``edited`` (the last answer comes back without its reasoning), ``fork``, ``compressed``."""
    head_len: int
    wait: float = 0.0
    """Until the session's next request, in scripted time."""
    last: bool = False
    """The session ends with this request."""
    after: list[Step] = field(default_factory=list["Step"])
    """Requests whose answers must be there before."""

    def hints(self, second: float) -> dict[str, Any]:
        """What a runtime would tell the cache. ``second``: length of a unit of scripted time."""
        told: dict[str, Any] = {"session": self.session, "head_len": self.head_len, "now_s": self.moment * second}
        if self.last:
            told["release"] = True
        else:
            told["wait_s"] = self.wait * second
        return {PARAMETER: told}


class Script:
    """All requests of a run, in the order in which they are sent."""

    def __init__(self, seed: int, concurrent: int, sessions: int, steps: int) -> None:
        self._chooser = random.Random(seed)
        self._heads = [self._tokens(length) for length in (500, 650, 800)]
        self._steps = steps
        self.requests: list[Step] = []
        free = [self._chooser.uniform(0, concurrent) for _ in range(concurrent)]
        heapq.heapify(free)
        for number in range(sessions):
            self._session(f"s{number}", heapq.heappop(free), free)
        self.requests.sort(key=lambda step: step.moment)

    def _tokens(self, length: int) -> list[int]:
        return self._chooser.choices(range(VOCABULARY), k=length)

    def _answer(self) -> list[int]:
        return [self._chooser.randrange(VOCABULARY)] * self._chooser.randint(8, 24)

    def _wait(self) -> float:
        """A tool is back soon; now and then a user has to be asked."""
        return self._chooser.expovariate(1 / 40 if self._chooser.random() < 0.08 else 1 / 5)

    def _add(self, step: Step, after: Sequence[Step]) -> Step:
        step.after = list(after)
        self.requests.append(step)
        return step

    def _session(self, name: str, moment: float, free: list[float]) -> None:
        """One session from its first request to its close; then its place is free."""
        chooser, head = self._chooser, self._chooser.choice(self._heads)
        history, kind = head + self._tokens(chooser.randint(60, 400)), "open"
        length = max(2, round(self._steps * chooser.uniform(0.6, 1.4)))
        before: list[Step] = []
        for number in range(length):
            step = self._add(Step(name, moment, list(history), self._answer(), kind, len(head)), before)
            step.last, before, kind = number == length - 1, [step], "turn"
            if chooser.random() < 0.12:
                before, moment = self._fork(step, history, moment)
                history += step.answer
            elif chooser.random() < 0.12:
                kind = "edited"
            else:
                history += step.answer
            history += self._tokens(chooser.choice([20, 40, 40, 80, 300]))
            if len(history) > COMPRESS_ABOVE:
                history, kind = head + self._tokens(chooser.randint(150, 300)) + history[-60:], "compressed"
            moment += 1 + self._wait()
            step.wait = moment - step.moment - 1
        heapq.heappush(free, moment)

    def _fork(self, parent: Step, context: list[int], moment: float) -> tuple[list[Step], float]:
        """Sub-agents that start together from the parent's context; the parent goes on when all of them are done."""
        lasts: list[Step] = []
        for child in range(self._chooser.randint(2, 3)):
            history, at, before = context + self._tokens(self._chooser.randint(30, 80)), moment + 1, [parent]
            length = self._chooser.randint(1, 3)
            for number in range(length):
                name = f"{parent.session}.{len(parent.prompt)}.{child}"
                step = self._add(Step(name, at, list(history), self._answer(), "fork", parent.head_len), before)
                step.last, before = number == length - 1, [step]
                history += step.answer + self._tokens(self._chooser.choice([20, 40, 80]))
                step.wait = self._wait()
                at += 1 + step.wait
            lasts += before
        return lasts, max(step.moment for step in lasts) + 1

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(len(step.prompt) for step in self.requests)

    def ideal_tokens(self) -> int:
        """Prompt tokens that must be computed when everything earlier is cached at every token, one at a time."""
        tree, computed = Tree(), 0
        for step in self.requests:
            path = array("q", step.prompt + step.answer)
            _, known = tree.walk(path[: len(step.prompt) - 1].tobytes())  # one token is computed for its logits
            computed += len(step.prompt) - known
            tree.insert(path[:-1].tobytes())  # the last token of an answer is sampled, never computed
        return computed
