"""The turns generated here, found by call id, by signature, by conversation and by parent: bounded, in memory."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock
from types import MappingProxyType

from agent_runtime.ledger.forgotten import ForgottenDigests
from k3_sglang.chat.types import Channel, Message

_SEVERAL = 0
"""No turn's number: stands for a call id of more than one."""


@dataclass(frozen=True, slots=True)
class TurnKeys:
    """Where a turn stands, as digests by meaning (see ``guard.fingerprint``).

    ``before`` is the conversation up to the turn, ``chain`` the same with the turn, ``loose`` that without system
    messages, ``between`` what stands between the turn before and this one, ``local`` the turn and the one message
    before it, ``visible`` the turn without its thinking, ``tools`` the tools of its request in any order.
    """

    before: bytes
    chain: bytes
    loose: bytes
    between: bytes
    local: bytes
    visible: bytes
    tools: bytes


@dataclass(frozen=True)
class KnownTurn:
    """One turn as it was generated and delivered.

    ``scope`` is the name the client gave its conversation, "" without one; ``session`` the ledger's number of it;
    ``owner`` whose key it came with, "" without keys.
    ``parent`` is the turn before it in its history, None for a first turn and where that one was not known. ``ids``
    are the output ids, from right after the generation prompt to the end-of-message id inclusive; None for a turn
    that was cut or not delivered whole, which can only be rendered from its text; empty for a whole turn of a server
    that gave no ids, which is replayed as its message. ``prompt_tokens`` are those of the
    prompt it was generated from, ``start`` is the channel that prompt had left open. ``put_back`` says that the
    client had left out the turn before it, and it was put back. ``signature`` is the opaque text that was delivered
    with it and leads back to it.
    """

    id: int
    session: int
    scope: str
    parent: int | None
    keys: TurnKeys
    message: Message
    start: Channel
    ids: tuple[int, ...] | None
    prompt_tokens: int
    put_back: bool = False
    signature: str = ""
    owner: str = ""

    @cached_property
    def replayed(self) -> Message:
        """The message that is encoded as the very ids; as its text when it has none that may be replayed."""
        return replace(self.message, recorded_ids=self.ids or None, recorded_start=self.start)

    @cached_property
    def cost(self) -> int:
        """What it counts against the bound, in tokens; text and keys are counted as tokens too."""
        calls = sum(len(call.arguments) for call in self.message.tool_calls)
        content = self.message.content if isinstance(self.message.content, str) else ""
        chars = calls + len(content) + len(self.message.reasoning or "")
        return len(self.ids or ()) + chars // 8 + 64


class TurnIndex:
    """A bounded map of known turns. The turn unused for longest goes first. Thread-safe; hold ``lock`` to read a whole.

    The places of turns that have gone stay marked, so that another turn there is not taken for the only one.
    """

    def __init__(self, max_tokens: int, max_turns: int) -> None:
        if max_tokens < 1 or max_turns < 1:
            raise ValueError(f"max_tokens={max_tokens} and max_turns={max_turns} must both be at least 1")
        self.lock = RLock()
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._turns: OrderedDict[int, KnownTurn] = OrderedDict()
        self._by_call: dict[str, int] = {}
        self._by_signature: dict[str, int] = {}
        self._places: tuple[dict[bytes, list[int]], ...] = ({}, {}, {}, {})  # chain, loose chain, before, local
        self._children: dict[int, list[int]] = {}
        self._forgotten = ForgottenDigests()
        self._numbers: dict[int, int] = {}
        self._tokens = 0

    def add(self, turn: KnownTurn) -> None:
        """Know one more turn. One that is larger than the whole bound is not kept."""
        if turn.cost > self._max_tokens or turn.id in self._turns:
            return
        with self.lock:
            if turn.ids is not None:
                # Each number once in memory, however often it occurs.
                turn = replace(turn, ids=tuple(map(self._numbers.setdefault, turn.ids, turn.ids)))
            self._turns[turn.id] = turn
            self._tokens += turn.cost
            for call in turn.message.tool_calls:
                if call.id:
                    self._by_call[call.id] = turn.id if call.id not in self._by_call else _SEVERAL
            if turn.signature:
                self._by_signature[turn.signature] = turn.id
            for place, key in zip(self._places, _place_keys(turn), strict=True):
                place.setdefault(key, []).append(turn.id)
            if turn.parent is not None:
                self._children.setdefault(turn.parent, []).append(turn.id)
            while self._tokens > self._max_tokens or len(self._turns) > self._max_turns:
                self._forget(next(iter(self._turns)))

    def get(self, turn: int) -> KnownTurn | None:
        """A turn by its number."""
        return self._turns.get(turn)

    def by_call(self, call_id: str) -> KnownTurn | None:
        """The one turn that was delivered with this call id. Ids made here are never made twice."""
        return self._turns.get(self._by_call.get(call_id, _SEVERAL))

    def by_signature(self, signature: str) -> KnownTurn | None:
        """The turn that was delivered with this signature."""
        return self._turns.get(self._by_signature.get(signature, _SEVERAL))

    def by_chain(self, chain: bytes) -> Sequence[KnownTurn]:
        """The turns that end this conversation, oldest first."""
        return self._at(0, chain)

    def by_loose(self, loose: bytes) -> Sequence[KnownTurn]:
        """The turns that end this conversation, system messages aside, oldest first."""
        return self._at(1, loose)

    def after(self, before: bytes) -> Sequence[KnownTurn]:
        """The turns that were generated to continue this conversation, oldest first."""
        return self._at(2, before)

    def alike(self, local: bytes) -> Sequence[KnownTurn]:
        """The turns that say this after this message, whatever stood before, oldest first."""
        return self._at(3, local)

    def children(self, turn: int) -> Sequence[KnownTurn]:
        """The turns whose history ended with this one, oldest first."""
        return [self._turns[number] for number in self._children.get(turn, ())]

    def has_forgotten(self, key: bytes) -> bool:
        """Whether a turn that stood at this place is no longer known; seldom wrong, and then on the safe side."""
        return key in self._forgotten

    def mark_forgotten(self, keys: TurnKeys) -> None:
        """Mark the places of a turn that is on record and not known here."""
        with self.lock:
            for key in (keys.chain, keys.loose, keys.local):
                self._forgotten.add(key)

    def touch(self, turns: Iterable[int]) -> None:
        """Count as a use."""
        with self.lock:
            known = self._turns
            for number in turns:
                if number in known:
                    known.move_to_end(number)

    def forget_sessions(self, sessions: Collection[int]) -> None:
        """Drop all turns of some sessions."""
        with self.lock:
            for number in [turn.id for turn in self._turns.values() if turn.session in sessions]:
                self._forget(number)

    @property
    def tokens(self) -> int:
        """What is kept now, as ``KnownTurn.cost`` counts it."""
        return self._tokens

    @property
    def turns(self) -> Mapping[int, KnownTurn]:
        """All turns by number, the one unused for longest first."""
        return MappingProxyType(self._turns)

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[KnownTurn]:
        return iter(self._turns.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts and the contents disagree or a bound is exceeded."""
        with self.lock:
            tokens = sum(turn.cost for turn in self._turns.values())
            assert tokens == self._tokens, f"tokens kept {tokens} != tokens counted {self._tokens}"
            assert tokens <= self._max_tokens, f"tokens kept {tokens} > max_tokens {self._max_tokens}"
            assert len(self._turns) <= self._max_turns, f"turns {len(self._turns)} > max_turns {self._max_turns}"
            for place in self._places:
                numbers = [number for found in place.values() for number in found]
                assert sorted(numbers) == sorted(self._turns), "a place names turns that are gone or misses some"
            assert set(self._by_call.values()) <= {*self._turns, _SEVERAL}, "a call id leads to a turn that is gone"
            signed = {turn.signature: turn.id for turn in self._turns.values() if turn.signature}
            assert signed == self._by_signature, "a signature leads to a turn that is gone or misses one"
            children = {number for found in self._children.values() for number in found}
            wanted = {turn.id for turn in self._turns.values() if turn.parent is not None}
            assert children == wanted, "children kept and turns with a parent differ"

    def _at(self, place: int, key: bytes) -> Sequence[KnownTurn]:
        return [self._turns[number] for number in self._places[place].get(key, ())]

    def _forget(self, number: int) -> None:
        turn = self._turns.pop(number)
        self._tokens -= turn.cost
        for call in turn.message.tool_calls:
            if self._by_call.get(call.id) == number:
                del self._by_call[call.id]
        self._by_signature.pop(turn.signature, None)
        for place, key in zip(self._places, _place_keys(turn), strict=True):
            _drop(place, key, number)
        self.mark_forgotten(turn.keys)
        if turn.parent is not None:
            _drop(self._children, turn.parent, number)


def _place_keys(turn: KnownTurn) -> tuple[bytes, ...]:
    return turn.keys.chain, turn.keys.loose, turn.keys.before, turn.keys.local


def _drop(places: "dict[bytes, list[int]] | dict[int, list[int]]", key: "bytes | int", number: int) -> None:
    found = places[key]  # type: ignore[index]
    found.remove(number)
    if not found:
        del places[key]  # type: ignore[arg-type]
