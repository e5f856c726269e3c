"""A chat request to prompt ids: its history checked against the record, recorded turns spliced in as their ids."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agent_runtime.engine.types import EngineImage, expanded_len
from agent_runtime.guard.counters import ReplayCounters
from agent_runtime.guard.fingerprint import Fingerprints, joined, tools_digest
from agent_runtime.guard.history import LOOSE_START, Matched, Scope
from agent_runtime.guard.matching import match
from agent_runtime.guard.repair import Mode, Repaired, refused, repair
from agent_runtime.guard.stability import Tip, Tips, extension
from agent_runtime.guard.verdict import Extension, HistoryNotIntact, Replay
from agent_runtime.ledger.turns import KnownTurn, TurnIndex, TurnKeys
from k3_sglang.chat.encode import EncodedPart, Prompt, encode_parts, render
from k3_sglang.chat.encode_cache import EncodeCache
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.tokenizer import K3Tokenizer
from k3_sglang.chat.types import ChatRequest, ImagePart, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the turn that a prompt asks for will stand: all of a `KnownTurn` that is known before it is generated."""

    scope: Scope
    parent: KnownTurn | None
    put_back: bool
    before: bytes
    between: bytes
    latest: bytes
    loose: bytes


@dataclass(frozen=True, slots=True)
class ReplayedPrompt:
    """A prompt, the images at its pads, what was found about its history, and where its turn will stand.

    ``request`` has the history as it was encoded, ``indices`` say which message of the request received each of its
    messages is, ``parts`` are the prompt's ids message by message.
    """

    prompt: Prompt
    images: tuple[EngineImage, ...]
    replay: Replay
    request: ChatRequest
    indices: tuple[int, ...]
    parts: tuple[EncodedPart, ...]
    place: Place

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the engine counts them, images expanded."""
        return expanded_len(self.prompt.ids, self.images)


@dataclass(frozen=True, slots=True)
class HistoryGuard:
    """The record of turns with what it takes to check a history against it; one for all requests. Thread-safe."""

    index: TurnIndex
    mode: Mode = "repair"
    prints: Fingerprints = field(default_factory=Fingerprints)
    tips: Tips = field(default_factory=Tips)
    counters: ReplayCounters = field(default_factory=ReplayCounters)

    def build(
        self, request: ChatRequest, scope: Scope, tokenizer: K3Tokenizer, cache: EncodeCache | None = None
    ) -> ReplayedPrompt:
        """Check a request's history and encode it, every turn that is known by the ids it was generated as.

        Raises ChatRequestError as ``encode`` does, and HistoryNotIntact in strict mode.
        """
        try:
            replayed = self.look(request, scope, tokenizer, cache)
        except HistoryNotIntact:
            self.counters.refuse()
            raise
        self.counters.count(replayed.replay)
        return replayed

    def look(
        self, request: ChatRequest, scope: Scope, tokenizer: K3Tokenizer, cache: EncodeCache | None = None
    ) -> ReplayedPrompt:
        """`build` for a prompt that nothing will be generated from: it is not counted."""
        try:
            matched = match(request, scope, self.index, self.prints)
            repaired = repair(request, matched, self.mode)
            if self.mode == "strict" and (wrong := refused(repaired.checks)):
                raise HistoryNotIntact(wrong)
            final = replace(request, messages=repaired.messages)
            parts = encode_parts(final, tokenizer, cache)
        except ChatRequestError:
            # A repaired history has other indices, so only the one received names the message's true index.
            render(request)
            raise
        ids: list[int] = []
        for part in parts:
            ids += part.ids
        replay = Replay(repaired.checks, self._extension(matched, repaired, final, parts))
        return ReplayedPrompt(
            Prompt(tuple(ids), request.start),
            tuple(EngineImage(image.source, image.tokens) for image in _images(final.messages, parts)),
            replay,
            final,
            repaired.indices,
            tuple(parts),
            place_of(matched, scope),
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
        """Keep a turn that was generated from a prompt. ``whole`` says that it may be replayed from its ids."""
        place = replayed.place
        visible = self.prints.visible(message)
        chain, loose = joined(place.before, visible), joined(place.loose, visible)
        turn = KnownTurn(
            id=number,
            session=session,
            scope=place.scope.name,
            parent=place.parent.id if place.parent is not None else None,
            keys=TurnKeys(
                before=place.before,
                chain=chain,
                loose=loose,
                between=place.between,
                local=joined(place.latest, visible),
                visible=visible,
                tools=tools_digest(replayed.request.tools),
            ),
            message=message,
            start=replayed.prompt.start,
            ids=self._replayable(output) if whole else None,
            prompt_tokens=replayed.prompt_tokens,
            put_back=place.put_back,
            signature=signature,
            owner=place.scope.owner,
        )
        self.tips.keep(number, Tip(replayed.parts, replayed.request, replayed.indices, tuple(output)))
        self.index.add(turn)
        return turn

    def _replayable(self, output: Sequence[int]) -> tuple[int, ...]:
        """The ids that a whole turn is replayed by."""
        return tuple(output)

    def _extension(
        self, matched: Matched, repaired: Repaired, final: ChatRequest, parts: Sequence[EncodedPart]
    ) -> Extension:
        """Compare with the prompt of the last turn whose prompt is known."""
        for step in reversed(matched.steps):
            if step.turn is not None and (tip := self.tips.find(step.turn.id)) is not None:
                found = extension(tip, final, repaired.indices, parts)
                if found.moved == "violation":
                    logger.error("a prompt does not begin with the one before it and its output: %s", found)
                return found
        return Extension(None)


def _images(messages: Sequence[Message], parts: Sequence[EncodedPart]) -> Iterator[ImagePart]:
    """The images in the order of the pads: results are put in the order of their calls."""
    for part in parts:
        content = messages[part.message].content if part.message is not None else None
        if isinstance(content, tuple):
            yield from (piece for piece in content if isinstance(piece, ImagePart))


def place_of(matched: Matched, scope: Scope) -> Place:
    """Where the turn that follows a matched history will stand."""
    loose = matched.steps[-1].loose if matched.steps else LOOSE_START
    end = matched.end
    return Place(
        scope=scope,
        parent=matched.last,
        put_back=bool(matched.steps) and matched.steps[-1].restored == "dropped",
        before=end.before,
        between=end.between,
        latest=end.latest,
        loose=joined(loose, end.between_loose),
    )
