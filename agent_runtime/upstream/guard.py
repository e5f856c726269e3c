"""The history guard before another server: a step's messages begin with those of the step before and its answer."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agent_runtime.guard.counters import ReplayCounters
from agent_runtime.guard.history import Matched, Scope, Step
from agent_runtime.guard.matching import match
from agent_runtime.guard.prompt import HistoryGuard, ReplayedPrompt, place_of
from agent_runtime.guard.repair import Repaired, refused, repair
from agent_runtime.guard.stability import extension
from agent_runtime.guard.verdict import Extension, HistoryNotIntact, Replay
from agent_runtime.ledger.turns import KnownTurn
from agent_runtime.upstream import wire
from agent_runtime.upstream.profiles import PROFILES, Profile
from k3_sglang.chat.encode import EncodedPart, Prompt, encode_parts
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, ImagePart, JSONObject, Message, ToolCall


@dataclass(frozen=True, slots=True)
class MessageExtension(Extension):
    """An `Extension` of messages: its sizes are bytes of their JSON, not tokens."""

    def facts(self) -> dict[str, Any]:
        """For an answer's ``k3.replay.prefix``."""
        if self.moved is None:
            return {"holds": self.holds}
        facts = asdict(self)
        return {
            **{key: facts[key] for key in ("holds", "moved", "index", "detail")},
            "common_bytes": self.common_tokens,
            "lost_bytes": self.lost_tokens,
        }


class MessageCounters(ReplayCounters):
    """`ReplayCounters` of messages: what was lost is counted in bytes."""

    def snapshot(self) -> dict[str, Any]:
        """All counts, as JSON."""
        return {"lost_bytes" if name == "lost_tokens" else name: count for name, count in super().snapshot().items()}


@dataclass(frozen=True, slots=True)
class MessagePrompt(ReplayedPrompt):
    """A request to another server. It has no ids; ``messages`` are what is sent.

    ``head`` and ``tail`` are the fields that stand before and behind the messages in the prompt. ``counted`` are the
    prompt's tokens as K3's encoder counts them, None without a tokenizer and where the request has images.
    """

    messages: tuple[JSONObject, ...]
    head: JSONObject
    tail: JSONObject
    counted: int | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens as counted here; 0 when they were not."""
        return self.counted or 0


@dataclass(frozen=True, slots=True)
class MessageGuard(HistoryGuard):
    """`HistoryGuard` without ids: the same matching and the same verdicts, messages instead of a prompt."""

    counters: ReplayCounters = field(default_factory=MessageCounters)
    profile: Profile = PROFILES["generic"]

    def ask(
        self,
        request: ChatRequest,
        scope: Scope,
        body: Mapping[str, Any],
        tokenizer: K3Tokenizer | None = None,
        cache: EncodeCache | None = None,
    ) -> MessagePrompt:
        """Check a request's history and write it as the server gets it. ``body`` is the request as received.

        Raises ChatRequestError for results that no tool can be named for, and HistoryNotIntact in strict mode.
        """
        matched = match(request, scope, self.index, self.prints)
        repaired = repair(request, matched, self.mode)
        if self.mode == "strict" and (wrong := refused(repaired.checks)):
            self.counters.refuse()
            raise HistoryNotIntact(wrong)
        messages, received = _exact(matched, repaired)
        final = replace(request, messages=messages)
        sent = wire.history(messages, received, self.profile)
        head = wire.head(request, effort_sent=_names_effort(body), profile=self.profile)
        tail = wire.tail(request, body.get("response_format"))
        parts = _parts(head, sent, tail)
        replay = Replay(repaired.checks, self._held(matched, repaired, final, parts))
        self.counters.count(replay)
        return MessagePrompt(
            Prompt((), request.start),
            (),
            replay,
            final,
            repaired.indices,
            tuple(parts),
            place_of(matched, scope),
            tuple(sent),
            head,
            tail,
            _counted(final, tokenizer, cache),
        )

    def record(
        self,
        replayed: ReplayedPrompt,
        number: int,
        session: int,
        message: Message,
        output: Sequence[int],
        *,
        whole: bool,
        signature: str = "",
    ) -> KnownTurn:
        """Keep a turn. There are no output ids: the message as it will be sent again stands for them."""
        spelled = wire.json_bytes(wire.assistant(message, self.profile))
        return HistoryGuard.record(self, replayed, number, session, message, spelled, whole=whole, signature=signature)

    def _replayable(self, output: Sequence[int]) -> tuple[int, ...]:
        return ()

    def _held(
        self, matched: Matched, repaired: Repaired, final: ChatRequest, parts: Sequence[EncodedPart]
    ) -> Extension:
        for step in reversed(matched.steps):
            if step.turn is not None and (tip := self.tips.find(step.turn.id)) is not None:
                found = extension(tip, final, repaired.indices, parts)
                return MessageExtension(**asdict(found))
        return Extension(None)


def _exact(matched: Matched, repaired: Repaired) -> tuple[tuple[Message, ...], dict[int, Sequence[ToolCall]]]:
    """The repaired history with the calls of known turns as they were received, and the client's calls by place.

    The guard keeps the client's call ids, which say what results answer; another server gets its own ids back.
    """
    messages = list(repaired.messages)
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if len(turns) != len(matched.steps):  # guard "off", and turns that the client stored in pieces stay as they are
        return tuple(messages), {}
    verdicts = {check.at: check.verdict for check in repaired.checks}
    received: dict[int, Sequence[ToolCall]] = {}
    for place, step in zip(turns, matched.steps, strict=True):
        if step.turn is None or verdicts.get(step.index) not in ("exact", "repaired") or not _same_calls(step):
            continue
        received[place] = step.message.tool_calls
        messages[place] = replace(messages[place], tool_calls=step.turn.message.tool_calls)
    return tuple(messages), received


def _same_calls(step: Step) -> bool:
    return step.turn is not None and len(step.message.tool_calls) == len(step.turn.message.tool_calls)


def _parts(head: JSONObject, messages: Sequence[JSONObject], tail: JSONObject) -> list[EncodedPart]:
    """What is sent, part by part, as bytes; compared like ids of a prompt."""
    parts = [EncodedPart(None, wire.json_bytes(head))]
    parts += [EncodedPart(place, wire.json_bytes(message)) for place, message in enumerate(messages)]
    if tail:
        parts.append(EncodedPart(None, wire.json_bytes(tail)))
    return parts


def _names_effort(body: Mapping[str, Any]) -> bool:
    thinking = body.get("thinking")
    return body.get("reasoning_effort") is not None or (isinstance(thinking, Mapping) and "effort" in thinking)


def _counted(request: ChatRequest, tokenizer: K3Tokenizer | None, cache: EncodeCache | None) -> int | None:
    if tokenizer is None or any(
        isinstance(part, ImagePart)
        for message in request.messages
        if isinstance(message.content, tuple)
        for part in message.content
    ):
        return None
    return sum(len(part.ids) for part in encode_parts(request, tokenizer, cache))


def passed_through(source: str, param: str) -> ImagePart:
    """Images are passed through: the server reads and measures them, and the same source is the same image."""
    return ImagePart(source, (1, 1), hashlib.sha256(source.encode()).digest())
