"""Stored responses: chains hold together, bounds hold, and what is counted is what is there."""

import json
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent_runtime.gateway.responses.store import ResponseStore, Stored

MAX_RESPONSES = 6
MAX_BYTES = 3_000


def begun(number: int, previous: Stored | None) -> Stored:
    """A response that runs."""
    token = f"{number:032x}"
    items = [{"type": "message", "role": "user", "content": f"in {number}", "id": f"msg_{token}_0000"}]
    response: dict[str, Any] = {"id": f"resp_{token}", "status": "in_progress", "output": []}
    return Stored(response, items, previous, f"k3.{number}")


def done(stored: Stored) -> dict[str, Any]:
    """The same when it is over."""
    thought = {"type": "reasoning", "id": f"rs_{stored.token}0000", "content": []}
    said = {"type": "message", "role": "assistant", "content": "out", "id": f"msg_{stored.token}0001"}
    return {**stored.response, "status": "completed", "output": [thought, said]}


class Store(RuleBasedStateMachine):
    """Responses come, fork, end and go; a plain list of all of them is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(MAX_RESPONSES, MAX_BYTES)
        self.all: list[Stored] = []

    def pick(self, data: st.DataObject) -> Stored:
        return data.draw(st.sampled_from(self.all))

    @rule(data=st.data(), continues=st.booleans())
    def begin(self, data: st.DataObject, continues: bool) -> None:
        # Also one that has gone in the meantime: it was found before its follower was prepared.
        previous = self.pick(data) if continues and self.all else None
        stored = begun(len(self.all), previous)
        self.all.append(stored)
        self.store.add(stored)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        stored = self.pick(data)
        if stored.running:
            self.store.update(stored, done(stored))

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def use_or_delete(self, data: st.DataObject) -> None:
        stored = self.pick(data)
        if self.store.find(stored.id) is not None and data.draw(st.booleans()):
            self.store.remove(stored)
            assert self.store.find(stored.id) is None
            assert self.store.find_item(stored.items[0]["id"]) is None

    @invariant()
    def the_count_is_what_is_held(self) -> None:
        held: dict[str, Stored] = {}
        for stored in self.all:
            link: Stored | None = stored if stored.listed else None
            while link is not None:
                held[link.id] = link
                link = link.previous
        sizes = {
            link.id: len(json.dumps(link.response, ensure_ascii=False))
            + len(json.dumps(link.items, ensure_ascii=False))
            for link in held.values()
        }
        assert self.store.bytes == sum(sizes.values())
        listed = [stored for stored in self.all if stored.listed]
        assert len(self.store) == len(listed)
        if any(not stored.running for stored in listed):
            assert len(listed) <= MAX_RESPONSES and self.store.bytes <= MAX_BYTES

    @invariant()
    def chains_are_whole_and_their_items_found(self) -> None:
        for stored in self.all:
            if not stored.listed:
                continue
            texts = [item["content"] for item in stored.input() if item.get("role") == "user"]
            numbers: list[int] = []
            link: Stored | None = stored
            while link is not None:
                numbers.append(self.all.index(link))
                link = link.previous
            assert texts == [f"in {number}" for number in reversed(numbers)]
            for item in (*stored.items, *stored.output()):
                assert self.store.find_item(item["id"]) == item
            for item in stored.output():
                assert item["type"] != "reasoning" or item["encrypted_content"] == stored.signature


TestStore = Store.TestCase
TestStore.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_an_item_that_a_client_named_itself_is_never_found() -> None:
    store = ResponseStore(MAX_RESPONSES, MAX_BYTES)
    stored = begun(1, None)
    store.add(Stored(stored.response, [{**stored.items[0], "id": "msg_" + "0" * 32 + "_0000"}], None, "k3.1"))
    assert store.find_item("msg_" + "0" * 32 + "_0000") is None
