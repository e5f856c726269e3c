"""Random sessions sent back by clients that lose thinking in every known way: is any turn given another's thinking?

    python benchmarks/replay_guard.py      # 10,000 histories; a minute

Sessions come in worlds that share one guard. Their openings, answers and calls are drawn from a few, so that many are
equal and only their thinking differs. The mutations bear the numbers of known failures of clients: 1 and 2 thinking
dropped, 4 filler, 5 filled with the latest, 6 a copy of the answer, 7 lost over a restart, 8 turns of another model,
17 turns split, 22 dropped before calls only, 23 handed on, 24 doubled, 31 turns dropped.

Per assistant turn of every history: exact, repaired, flagged (missing or foreign, and nothing put in), silent (neither
right nor flagged) or wrong (given what another turn thought). The last two must be 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agent_runtime.guard.history import Scope
from agent_runtime.guard.prompt import HistoryGuard, ReplayedPrompt
from agent_runtime.ledger.turns import KnownTurn, TurnIndex
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, JSONObject, Message, ToolCall
from k3_sglang.tiny.checkpoint import ensure

STEPS = 6
"""Most steps of a session; a history is one request of one."""
OPENINGS = ("hi", "fix the bug", "what is in the folder?")
ANSWERS = ("Done.", "Let me look.", "It works now, I think.")
THOUGHTS = ("", "I should look at the files first.")
TOOL: JSONObject = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@dataclass
class Turn:
    """A turn as it was: what it thought can be told from its number."""

    number: int
    message: Message
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """A message as a client sends it, and the turn it is, if any. ``message`` None: the client left it out."""

    message: Message | None
    turn: Turn | None = None


History = list[Sent]
Mutation = Callable[[History, random.Random], History]


def changed(history: History, change: Callable[[Message, int], Message | None]) -> History:
    """The history with every assistant message changed; ``change`` gets the message and which turn it is."""
    sent: History = []
    turns = 0
    for entry in history:
        if entry.message is not None and entry.message.role == "assistant":
            entry = Sent(change(entry.message, turns), entry.turn)
            turns += 1
        sent.append(entry)
    return sent


def thinking_dropped(history: History, rng: random.Random) -> History:
    """1: an SDK that keeps thinking for models of certain names only."""
    return changed(history, lambda message, _: replace(message, reasoning=None))


def thinking_dropped_and_arguments_respelled(history: History, rng: random.Random) -> History:
    """2: a framework that drops thinking, writes arguments anew and calls the calls by its own ids."""
    renamed: dict[str, str] = {}

    def call(old: ToolCall) -> ToolCall:
        renamed[old.id] = f"own_{len(renamed)}"
        arguments = json.dumps(dict(reversed(json.loads(old.arguments).items())), indent=1)
        return ToolCall(renamed[old.id], old.name, arguments)

    sent = changed(history, lambda m, _: replace(m, reasoning=None, tool_calls=tuple(map(call, m.tool_calls))))
    return [
        Sent(replace(entry.message, tool_call_id=renamed[entry.message.tool_call_id or ""]))
        if entry.message is not None and entry.message.role == "tool"
        else entry
        for entry in sent
    ]


def filler(history: History, rng: random.Random) -> History:
    """4: users who put something there so that nothing complains."""
    text = rng.choice((".", " ", "...", "placeholder"))
    return changed(history, lambda message, _: replace(message, reasoning=text))


def latest(history: History, rng: random.Random) -> History:
    """5: every gap filled with the thinking that came last."""
    thoughts = [entry.message.reasoning for entry in history if entry.message is not None and entry.turn is not None]
    return changed(history, lambda message, _: replace(message, reasoning=thoughts[-1]))


def copied(history: History, rng: random.Random) -> History:
    """6: the visible text once more as thinking."""
    return changed(history, lambda message, _: replace(message, reasoning=str(message.content)))


def other_model(history: History, rng: random.Random) -> History:
    """8: turns of another model stand before, their thinking in their text or nowhere."""
    before: History = [Sent(Message("user", "before"))]
    for number in range(3):
        before.append(Sent(Message("assistant", f"<think>hm {number}</think>{rng.choice(ANSWERS)}")))
        before.append(Sent(Message("user", rng.choice(OPENINGS))))
    return before + thinking_dropped(history, rng)


def split(history: History, rng: random.Random) -> History:
    """17: prose and calls of one turn as two messages, the thinking with both, one or none."""
    sent: History = []
    for entry in history:
        message = entry.message
        if message is None or not (message.tool_calls and message.content):
            sent.append(entry)
            continue
        first, second = rng.choice(((True, True), (True, False), (False, True), (False, False)))
        prose = replace(message, tool_calls=(), reasoning=message.reasoning if first else None)
        calls = replace(message, content=None, reasoning=message.reasoning if second else None)
        sent += [Sent(prose, entry.turn), Sent(calls, entry.turn)]
    return sent


def dropped_before_calls(history: History, rng: random.Random) -> History:
    """22: a conversion that loses the thinking before a call."""
    return changed(history, lambda m, _: replace(m, reasoning=None if m.tool_calls else m.reasoning))


def handed_on(history: History, rng: random.Random) -> History:
    """23: a conversion that gives each turn the thinking of the one before."""
    thoughts: list[str | None] = [None]

    def change(message: Message, turn: int) -> Message:
        thoughts.append(message.reasoning)
        return replace(message, reasoning=thoughts[turn])

    return changed(history, change)


def doubled(history: History, rng: random.Random) -> History:
    """24: the thinking twice in one turn."""
    glue = rng.choice(("", "\n"))
    return changed(history, lambda m, _: replace(m, reasoning=f"{m.reasoning}{glue}{m.reasoning}"))


def truncated(history: History, rng: random.Random) -> History:
    """Thinking cut at a limit of the client."""
    length = rng.randint(1, 30)
    return changed(history, lambda m, _: replace(m, reasoning=(m.reasoning or "")[:length]))


def turns_left_out(history: History, rng: random.Random) -> History:
    """31: a turn that called no tool is thrown away before the next prompt."""
    return [
        Sent(None, entry.turn)
        if entry.turn is not None and entry.message is not None and not entry.message.tool_calls
        else entry
        for entry in history
    ]


def head_cut(history: History, rng: random.Random) -> History:
    """A window that slides; all thinking is gone too."""
    places = [place for place, entry in enumerate(history) if entry.message and entry.message.role == "user"]
    return thinking_dropped(history[places[len(places) // 2] :], rng)


def prose_dropped(history: History, rng: random.Random) -> History:
    """A client that sends no text beside calls."""
    return changed(history, lambda m, _: replace(m, reasoning=None, content=None if m.tool_calls else m.content))


def any_of_these(history: History, rng: random.Random) -> History:
    """Another fault in every turn."""
    makers = (".", None, "I should look at the files first.", "thoughts of somebody else entirely")
    return changed(history, lambda m, _: replace(m, reasoning=rng.choice((*makers, m.reasoning))))


MUTATIONS: dict[str, Mutation] = {
    "intact": lambda history, _: history,
    "1": thinking_dropped,
    "2": thinking_dropped_and_arguments_respelled,
    "4": filler,
    "5": latest,
    "6": copied,
    "8": other_model,
    "17": split,
    "22": dropped_before_calls,
    "23": handed_on,
    "24": doubled,
    "31": turns_left_out,
    "truncated": truncated,
    "head cut": head_cut,
    "prose dropped": prose_dropped,
    "mixed": any_of_these,
}


@dataclass
class Session:
    """A conversation: what really happened."""

    name: str
    mutation: str
    system: str
    history: History = field(default_factory=list)


@dataclass
class Result:
    """Turns by mutation and outcome; ``faults`` describes the first of what must not be."""

    histories: int = 0
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, mutation: str, outcome: str, fault: str = "") -> None:
        """Count one turn."""
        self.outcomes.setdefault(mutation, Counter())[outcome] += 1
        if outcome in ("unseen", "silent", "wrong", "broken"):
            self.faults.append(f"{mutation}: {outcome}: {fault}")

    def total(self, outcome: str) -> int:
        """Turns with an outcome, whatever the mutation."""
        return sum(counts[outcome] for counts in self.outcomes.values())


class World:
    """Sessions that share a guard."""

    def __init__(self, rng: random.Random, tokenizer: K3Tokenizer, result: Result) -> None:
        self.rng = rng
        self.tokenizer = tokenizer
        self.result = result
        self.bound = rng.choice((100_000, 100_000, 100_000, 12))
        self.guard = HistoryGuard(TurnIndex(10_000_000, self.bound))
        self.cache = EncodeCache(100_000)
        self.turns = 0
        self.stored: list[KnownTurn] = []

    def play(self, sessions: int) -> None:
        """Sessions step by step in random order, now and then a restart."""
        known = list(MUTATIONS)
        mutations = self.rng.choices(known, k=sessions)
        running = [
            Session(
                self.rng.choice(("", f"session {number}", f"session {number}")),
                mutation,
                self.rng.choice(("", "", "S")),
            )
            for number, mutation in enumerate(mutations)
        ]
        steps = [session for session in running for _ in range(self.rng.randint(2, STEPS))]
        self.rng.shuffle(steps)
        for session in steps:
            self.step(session)
            if self.rng.random() < 0.05:
                self.restart()

    def restart(self) -> None:
        """7: the process is another, and has only what was stored."""
        index = TurnIndex(10_000_000, self.bound)
        for turn in self.stored[: -self.bound]:
            index.mark_forgotten(turn.keys)
        for turn in self.stored[-self.bound :]:
            index.add(turn)
        self.guard = HistoryGuard(index)

    def step(self, session: Session) -> None:
        """Ask, check what the guard made of the history, and answer."""
        session.history += self.said(session)
        sent = MUTATIONS[session.mutation](list(session.history), self.rng)
        messages = tuple(entry.message for entry in sent if entry.message is not None)
        system = (Message("system", session.system),) if session.system else ()
        request = ChatRequest((*system, *messages), tools=(TOOL,))
        built = self.guard.build(request, Scope(session.name, bool(session.name)), self.tokenizer, self.cache)
        self.result.histories += 1
        self.check(session, sent, len(system), built)
        turn = self.answer()
        self.stored.append(self.guard.record(built, 10 * turn.number, 1, turn.message, turn.ids, whole=True))
        session.history.append(Sent(turn.message, turn))

    def said(self, session: Session) -> History:
        """What comes before the next turn: results of the calls, or the user."""
        last = session.history[-1].message if session.history else None
        if last is not None and last.tool_calls:
            results = [
                Message("tool", self.rng.choice(("a", "b")), tool_call_id=c.id, name=c.name) for c in last.tool_calls
            ]
            return [Sent(result) for result in results]
        return [Sent(Message("user", self.rng.choice(OPENINGS)))]

    def answer(self) -> Turn:
        """A turn of its own in thinking and ids, and like many others in what can be seen."""
        self.turns += 1
        rng, number = self.rng, self.turns
        thought = rng.choice((*THOUGHTS, *(f"thought number {number} of this world, and no other has it",) * 6))
        calls = tuple(
            ToolCall(f"call_{number:020x}{place:04x}", "read", json.dumps({"path": rng.choice("ab"), "line": 1.0}))
            for place in range(rng.choice((0, 1, 1, 2)))
        )
        content = rng.choice(("", *ANSWERS)) if calls else rng.choice(ANSWERS)
        ids = (number // 1000 % 1000, number % 1000, self.tokenizer.special.end_of_msg)
        return Turn(number, Message("assistant", content, thought, calls), ids)

    def check(self, session: Session, sent: History, shift: int, built: ReplayedPrompt) -> None:
        """Hold every assistant message of the prompt against the turn that it is."""
        flags = {check.at: check for check in built.replay.checks}
        received = [entry for entry in sent if entry.message is not None]
        left_out: dict[int, list[Turn]] = {}
        at = shift
        for entry in sent:
            if entry.message is None and entry.turn is not None:
                left_out.setdefault(at, []).append(entry.turn)
            at += entry.message is not None
        for place, message in enumerate(built.request.messages):
            if message.role != "assistant":
                continue
            index = built.indices[place]
            truth = received[index - shift].turn
            if received[index - shift].message is None or index in left_out and truth is None:
                truth = left_out[index].pop(0)
            outcome = self.outcome(message, truth, index in flags and flags[index].verdict or "none")
            if outcome == "wrong" and not session.name and self.is_twin(message, received[index - shift].message):
                outcome = "twin"
            self.result.add(session.mutation, outcome, f"{built.replay.header()} {message} instead of {truth}")
        for index, turns in left_out.items():
            for turn in turns:
                told = index in flags or 10 * turn.number not in self.guard.index.turns
                self.result.add(session.mutation, "flagged" if told else "unseen", f"{turn} left out before {index}")
        # Nameless sessions may be equal in all but the ids of their turns; then some goes on from another's.
        intact = session.name and session.mutation == "intact" and built.replay.verdict == "exact"
        if intact and built.replay.extension.holds is False:
            self.result.add(session.mutation, "broken", str(built.replay.extension))

    def is_twin(self, message: Message, sent: Message | None) -> bool:
        """Whether a nameless client sent the very thinking of a turn that is equal in all else: that is its turn."""
        return sent is not None and bool(sent.reasoning) and sent.reasoning == message.reasoning

    def outcome(self, message: Message, truth: Turn | None, verdict: str) -> str:
        """What became of one turn."""
        if truth is None:
            if message.recorded_ids is not None or message.reasoning:
                return "wrong"
            return "flagged" if verdict in ("missing", "foreign") else "silent"
        right = (truth.message.reasoning or "").strip()
        if message.recorded_ids is not None:
            found = self.guard.index.turns.get(10 * (message.recorded_ids[0] * 1000 + message.recorded_ids[1]))
            thought = (found.message.reasoning or "").strip() if found is not None else None
            if thought != right:
                return "wrong"
            return "exact" if verdict == "exact" else "repaired"
        if verdict in ("missing", "foreign"):
            return "flagged"
        return "repaired" if (message.reasoning or "").strip() == right else "silent"


def play(histories: int, seed: int) -> Result:
    """At least that many random histories."""
    rng = random.Random(seed)
    tokenizer = K3Tokenizer.from_dir(ensure())
    result = Result()
    while result.histories < histories:
        World(rng, tokenizer, result).play(rng.choice((1, 2, 2, 4, 12, 40)))
    return result


def main() -> int:
    """Play; exit code 1 when a turn was given another's thinking or lost its own in silence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = play(options.histories, options.seed)
    outcomes = ("exact", "repaired", "flagged", "twin", "unseen", "silent", "wrong", "broken")
    print(f"assistant turns of {result.histories} histories")
    print(f"{'case':14}", *(f"{outcome:>9}" for outcome in outcomes))
    for name, counts in sorted(result.outcomes.items()):
        print(f"{name:14}", *(f"{counts[outcome]:9}" for outcome in outcomes))
    for fault in result.faults[:10]:
        print(fault)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
