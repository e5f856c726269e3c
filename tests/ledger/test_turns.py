"""The index of known turns: bounded, consistent whatever is added, and mindful of what it has forgotten."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent_runtime.ledger.forgotten import ForgottenDigests
from agent_runtime.ledger.turns import KnownTurn, TurnIndex, TurnKeys
from k3_sglang.chat.types import Message, ToolCall

MAX_TURNS = 5
MAX_TOKENS = 64 * MAX_TURNS + 30


def digest(*value: object) -> bytes:
    """Some digest that says which place it is."""
    return repr(value).encode().ljust(16, b".")[:16]


def made(number: int, place: int = 0, *, parent: int | None = None, ids: int = 3, call_id: str = "") -> KnownTurn:
    """A turn at one of a few places."""
    names = ("before", "chain", "loose", "between", "local", "visible", "tools")
    keys = TurnKeys(*(digest(name, place) for name in names))
    calls = (ToolCall(call_id, "f", "{}"),) if call_id else ()
    message = Message("assistant", "", "", calls)
    return KnownTurn(number, number % 3, "", parent, keys, message, "think", tuple(range(ids)), 1)


class Bounded(RuleBasedStateMachine):
    """Against a list in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.index = TurnIndex(MAX_TOKENS, MAX_TURNS)
        self.numbers = itertools.count(1)
        self.model: list[KnownTurn] = []
        self.gone: list[KnownTurn] = []

    @rule(place=st.integers(0, 3), ids=st.integers(0, 40), call=st.integers(0, 4), parent=st.integers(0, 8))
    def add(self, place: int, ids: int, call: int, parent: int) -> None:
        number = next(self.numbers)
        turn = made(number, place, parent=parent or None, ids=ids, call_id=f"c{call}" if call else "")
        self.index.add(turn)
        self.model.append(turn)
        while sum(t.cost for t in self.model) > MAX_TOKENS or len(self.model) > MAX_TURNS:
            self.gone.append(self.model.pop(0))

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        if self.model:
            turn = data.draw(st.sampled_from(self.model))
            self.index.touch([turn.id, 999])
            self.model.remove(turn)
            self.model.append(turn)

    @rule(session=st.integers(0, 2))
    def forget_session(self, session: int) -> None:
        self.index.forget_sessions({session})
        self.gone += [turn for turn in self.model if turn.session == session]
        self.model = [turn for turn in self.model if turn.session != session]

    @invariant()
    def agrees(self) -> None:
        self.index.check_integrity()
        assert [turn.id for turn in self.index] == [turn.id for turn in self.model]
        for turn in self.model:
            assert turn in self.index.by_chain(turn.keys.chain)
            assert turn in self.index.by_loose(turn.keys.loose)
            assert turn in self.index.after(turn.keys.before)
            assert turn in self.index.alike(turn.keys.local)
            if turn.parent is not None:
                assert turn in self.index.children(turn.parent)
            for call in turn.message.tool_calls:
                others = [t for t in (*self.model, *self.gone) if call in t.message.tool_calls and t.id != turn.id]
                if not others:
                    assert self.index.by_call(call.id) == turn
        assert all(self.index.has_forgotten(turn.keys.chain) for turn in self.gone)


TestBounded = Bounded.TestCase
TestBounded.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_a_call_id_of_two_turns_leads_to_neither() -> None:
    index = TurnIndex(10_000, 10)
    index.add(made(1, call_id="c"))
    assert index.by_call("c") == made(1, call_id="c")
    index.add(made(2, call_id="c"))
    assert index.by_call("c") is None


@pytest.mark.parametrize("bounds", [(0, 1), (1, 0)])
def test_empty_bounds_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must both be at least 1"):
        TurnIndex(*bounds)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=50))
def test_what_was_forgotten_is_never_taken_for_new(digests: list[bytes]) -> None:
    forgotten = ForgottenDigests()
    for value in digests:
        forgotten.add(value)
    assert all(value in forgotten for value in digests)
    assert bytes(16) not in ForgottenDigests()
