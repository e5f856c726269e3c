"""Conversations and their token ids with loss weights: what training reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from k3_sglang.chat.encode import encode_parts, render
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.request import parse_request
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, Segment

FREE_WEIGHT: Final = 0.25
"""Loss weight of a turn in which the assistant invents something: nobody can foresee it, and what cannot be foreseen
drowns the gradient of what can. Not zero, for it has to be learnt that all choices are equally likely."""

REPEATED_WEIGHT: Final = 0.1
"""Loss weight of a token that is not the model's own but continues a pair of tokens as the conversation did before."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One whole conversation in K3's prompt format. The fields have the same length."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    """Loss weight of each id as a target: 1 what the assistant writes, 0 what cannot be foreseen."""
    skill: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call with the text that comes back."""

    tool: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(slots=True)
class Talk:
    """A conversation in the making, as the body of a request and the answers to it."""

    skill: str
    tools: Sequence[Mapping[str, Any]] = ()
    system: str | None = None
    effort: str = "max"
    tool_choice: str | None = None
    """Of the last answer's request."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    weights: list[float] = field(default_factory=list[float])
    """One for each message; only an assistant's counts."""
    calls: int = 0

    def __post_init__(self) -> None:
        if self.system is not None:
            self._add({"role": "system", "content": self.system})

    def user(self, text: str) -> None:
        """The user says something."""
        self._add({"role": "user", "content": text})

    def answer(self, text: str, think: str = "", weight: float = 1.0) -> None:
        """The assistant thinks and ends its turn with a text."""
        self._add({"role": "assistant", "content": text, "reasoning_content": think}, weight)

    def call(self, *calls: Call, think: str = "", weight: float = 1.0) -> None:
        """The assistant thinks and calls tools, side by side; `weight` 0 for a call that was a mistake."""
        names = [f"call_{self.calls + number}" for number in range(len(calls))]
        self.calls += len(calls)
        wire = [
            {"id": name, "type": "function", "function": {"name": made.tool, "arguments": _arguments(made)}}
            for name, made in zip(names, calls, strict=True)
        ]
        message = {"role": "assistant", "content": "", "reasoning_content": think, "tool_calls": wire}
        self._add(message, weight)
        for name, made in zip(names, calls, strict=True):
            self._add({"role": "tool", "tool_call_id": name, "content": made.result})

    def body(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The request body that some of the messages are sent in."""
        body: dict[str, Any] = {"messages": list(messages), "reasoning_effort": self.effort}
        if self.tools:
            body["tools"] = list(self.tools)
        if self.tool_choice is not None:
            body["tool_choice"] = self.tool_choice
        return body

    def texts(self) -> list[Segment]:
        """The segments of the whole conversation, for the vocabulary."""
        return render(replace(parse_request(self.body(self.messages)), add_generation_prompt=False))

    def sample(self, tokenizer: K3Tokenizer, cache: EncodeCache | None = None) -> Sample:
        """Ids and weights. The last message is the assistant's."""
        if self.messages[-1]["role"] != "assistant":
            raise ValueError(f"the conversation ends with {self.messages[-1]['role']!r}; let the assistant answer")
        prompt = parse_request(self.body(self.messages[:-1]))
        begun = len(encode_parts(_EMPTY, tokenizer)[-1].ids)
        ids: list[int] = []
        weights: list[float] = []
        for part in encode_parts(prompt, tokenizer, cache)[:-1]:
            self._append(ids, weights, part.message, part.ids, begun)
        last = replace(prompt, messages=parse_request(self.body(self.messages[-1:])).messages, tools=())
        turn = encode_parts(replace(last, effort=None, tool_choice=None, add_generation_prompt=False), tokenizer)[-1]
        self._append(ids, weights, len(self.messages) - 1, turn.ids, begun)
        _weigh_repeated(ids, weights)
        return Sample(tuple(ids), tuple(weights), self.skill)

    def _append(
        self, ids: list[int], weights: list[float], message: int | None, added: Sequence[int], begun: int
    ) -> None:
        own = message is not None and self.messages[message]["role"] == "assistant"
        ids += added
        if own and message is not None:
            weights += [0.0] * begun + [self.weights[message]] * (len(added) - begun)
        else:
            weights += [-1.0] * len(added)  # until it is known whether the token repeats something

    def _add(self, message: dict[str, Any], weight: float = 0.0) -> None:
        self.messages.append(message)
        self.weights.append(weight)


_EMPTY: Final = ChatRequest(messages=(), effort=None)


def _arguments(made: Call) -> str:
    return json.dumps(dict(made.arguments), ensure_ascii=False)


def _weigh_repeated(ids: Sequence[int], weights: list[float]) -> None:
    """Settle the weights of tokens that are not the assistant's, which are -1 so far."""
    seen: set[tuple[int, int, int]] = set()
    first = second = -1
    for position, token in enumerate(ids):
        here = (first, second, token)
        if weights[position] < 0:
            weights[position] = REPEATED_WEIGHT if here in seen else 0.0
        seen.add(here)
        first, second = second, token
