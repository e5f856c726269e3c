"""The facts of the latest steps in memory, by session: bounded, without content, cheap to write."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from agent_runtime.inspector.facts import StepFacts, TurnFacts


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session as far as its steps are kept. ``steps`` are in the order in which they came, at least one."""

    id: int
    steps: Sequence[StepFacts]

    @property
    def name(self) -> str:
        """The client's name for it, "" without one."""
        return self.steps[-1].name

    @property
    def used_ms(self) -> int:
        """When its last request came."""
        return self.steps[-1].created_ms

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all steps with an answer."""
        return sum(step.prompt_tokens for step in self.steps if step.turns)

    @property
    def cached_tokens(self) -> int:
        """How many of them were not computed again."""
        return sum(step.cached_tokens for step in self.steps if step.turns)


class StepLog:
    """The latest ``max_steps`` steps; the oldest goes first. Thread-safe.

    Adding costs the same however many there are. ``version`` changes with every change, so that a page that is
    looked at again and again is made anew only when there is something new.
    """

    def __init__(self, max_steps: int) -> None:
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps} must be at least 1")
        self.max_steps = max_steps
        self.version = 0
        self._lock = Lock()
        self._steps: OrderedDict[int, StepFacts] = OrderedDict()
        self._sessions: OrderedDict[int, deque[StepFacts]] = OrderedDict()
        self._abandoned: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepFacts) -> None:
        """A request has come."""
        with self._lock:
            self.version += 1
            self._steps[step.id] = step
            step.abandoned_from = self._abandoned.pop(step.session, step.abandoned_from)
            self._sessions.setdefault(step.session, deque()).append(step)
            self._sessions.move_to_end(step.session)
            if len(self._steps) > self.max_steps:
                _, oldest = self._steps.popitem(last=False)
                of_session = self._sessions[oldest.session]
                of_session.remove(oldest)  # the first one, unless requests overtook each other on their way here
                if not of_session:
                    del self._sessions[oldest.session]
                    self._abandoned.pop(oldest.session, None)

    def abandoned(self, session: int, start: int) -> None:
        """Its client will not go on behind token ``start``, as after a compression: told of its next step."""
        with self._lock:
            if session in self._sessions:
                self._abandoned[session] = start

    def began(self, step: int, now_ms: int, cached_tokens: int) -> None:
        """Its first token has come, and with it how much of the prompt was cached."""
        with self._lock:
            found = self._steps.get(step)
            if found is not None and found.began_ms is None:
                self.version += 1
                found.began_ms, found.began_cached_tokens = now_ms, cached_tokens

    def turn(self, step: int, turn: TurnFacts) -> None:
        """One of its answers is on record."""
        with self._lock:
            found = self._steps.get(step)
            if found is not None:
                self.version += 1
                found.turns = sorted([*found.turns, turn], key=lambda turn: turn.choice)

    def ended(self, step: int, now_ms: int) -> None:
        """Nothing more comes of it."""
        with self._lock:
            found = self._steps.get(step)
            if found is not None and found.running:
                self.version += 1
                found.running = False
                found.ended_ms = now_ms

    def forget_sessions(self, sessions: Iterable[int]) -> None:
        """Drop all steps of some sessions."""
        with self._lock:
            self.version += 1
            for session in sessions:
                self._abandoned.pop(session, None)
                for step in self._sessions.pop(session, ()):
                    del self._steps[step.id]

    def count_sessions(self) -> int:
        """Sessions with a step that is kept."""
        return len(self._sessions)

    def sessions(self, start: int, most: int) -> list[SessionFacts]:
        """Sessions, the one used last first; ``most`` of them from the one at ``start``."""
        with self._lock:
            newest_first = list(reversed(self._sessions))[start : start + most]
            return [SessionFacts(number, tuple(self._sessions[number])) for number in newest_first]

    def session(self, number: int) -> SessionFacts | None:
        """One session."""
        with self._lock:
            steps = self._sessions.get(number)
            return None if steps is None else SessionFacts(number, tuple(steps))

    def step(self, number: int) -> StepFacts | None:
        """One step."""
        return self._steps.get(number)

    def following(self, step: StepFacts) -> list[StepFacts]:
        """The steps of its session that go on from one of its turns."""
        session = self.session(step.session)
        turns = {turn.id for turn in step.turns}
        return [] if session is None else [other for other in session.steps if other.parent in turns]
