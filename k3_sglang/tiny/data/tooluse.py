"""Conversations about calling tools: choice among several, copied arguments, calls side by side, use of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from k3_sglang.tiny.data.chatter import chatter
from k3_sglang.tiny.data.names import Draw
from k3_sglang.tiny.data.sample import Call, Talk
from k3_sglang.tiny.data.toolkinds import KINDS, ToolKind, Value


@dataclass(frozen=True, slots=True)
class Declared:
    """A tool as one conversation declares it, maybe under made-up names."""

    kind: ToolKind
    name: str
    renamed: Mapping[str, str]

    @property
    def plain(self) -> bool:
        """Whether it has its own name."""
        return self.name == self.kind.name


@dataclass(frozen=True, slots=True)
class Job:
    """One thing the user asks, the call it takes, and the answer that follows from the result."""

    ask: str
    think: str
    call: Call
    note: str
    """What is thought of the result."""
    answer: str


def declare(draw: Draw, count: int) -> list[Declared]:
    """Some tools; of about a third of all conversations, tools with made-up names."""
    made_up = draw.chance(0.35)
    kinds = draw.rng.sample(KINDS, count)
    return [_renamed(draw, kind) if made_up else Declared(kind, kind.name, {}) for kind in kinds]


def _renamed(draw: Draw, kind: ToolKind) -> Declared:
    name = draw.name() if draw.chance(0.5) else f"{draw.name(2)}_{draw.name(2)}"
    return Declared(kind, name, {key: draw.name(2) for key in kind.parameters} if draw.chance(0.5) else {})


def schemas(tools: Sequence[Declared]) -> list[dict[str, object]]:
    """The declarations of a request."""
    return [tool.kind.schema(tool.name, tool.renamed) for tool in tools]


def job(draw: Draw, tool: Declared) -> Job:
    """Something to do with a tool; sometimes the user says which one and with what.

    The thinking takes one step at a time: what the user wants, in the words of the declaration, then the name that
    stands behind these words there. The name first would be two steps in one token.
    """
    kind = tool.kind
    made: dict[str, Value] = {key: parameter.make(draw) for key, parameter in kind.parameters.items()}
    # In the order of the declaration, so that each argument's name stands behind the one before.
    values = {key: made[key] for key in sorted(made, key=lambda key: tool.renamed.get(key, key))}
    shown = {key: _shown(value) for key, value in values.items()}
    facts = shown | {"n": str(draw.number(2, 9999)), "r": draw.name()}
    result = kind.result.format(**facts)
    failed = draw.chance(0.06)
    call = Call(
        tool.name,
        {tool.renamed.get(key, key): value for key, value in values.items()},
        "error: not available" if failed else result,
    )
    wish = kind.description
    if draw.chance(0.25):
        wish = "As asked:"
        wanted = " and ".join(f"{tool.renamed.get(key, key)} {value}" for key, value in shown.items())
        ask = f"{draw.pick(('Call', 'Use', 'Please call'))} {tool.name} with {wanted}."
        answer = f"The result is: {result}"
    else:
        ask, answer = draw.pick(kind.asks).format(**shown), kind.answer.format(**facts)
    if failed:
        answer = f"{tool.name} failed: not available."
    return Job(ask, f"{wish} {tool.name}", call, f"{wish} {call.result}", answer)


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tool_use(draw: Draw) -> Talk:
    """One to four user turns over one to four tools; a few turns need none."""
    tools = declare(draw, draw.pick((1, 2, 2, 3, 3, 4)))
    talk = Talk("tools", schemas(tools), system=draw.pick((None, None, None, "You are a helpful assistant.")))
    for _ in range(draw.rng.randint(1, 4)):
        if draw.chance(0.12):
            chatter(draw, talk)
        else:
            ask(draw, talk, tools)
    return talk


def ask(draw: Draw, talk: Talk, tools: Sequence[Declared]) -> list[Job]:
    """One user turn that takes one call, or two side by side, and its answer."""
    jobs = [job(draw, draw.pick(tools)) for _ in range(draw.pick((1, 1, 2)))]
    talk.user(" ".join(made.ask for made in jobs))
    talk.call(*(made.call for made in jobs), think="\n".join(made.think for made in jobs))
    talk.answer(" ".join(made.answer for made in jobs), think="\n".join(made.note for made in jobs))
    return jobs
