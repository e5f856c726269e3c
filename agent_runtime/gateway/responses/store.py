"""The responses that are kept: bounded, in memory; a response holds the ones it goes on from."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent_runtime.gateway.responses.item_ids import RESPONSE_PREFIX
from agent_runtime.gateway.responses.items import Item

Json = dict[str, Any]
RUNNING: Final = ("queued", "in_progress")


@dataclass(eq=False, slots=True)
class Stored:
    """A response with its own input, all items with ids, and the response it continues.

    ``signature`` leads back to its turn. ``followers`` counts the kept responses that continue it; while there are any
    its items stay, though it may no longer be found itself. ``items_bytes`` is the size of ``items`` as JSON, counted
    when it is kept if nobody has counted it before.
    """

    response: Json
    items: Sequence[Item]
    previous: "Stored | None"
    signature: str
    items_bytes: int = 0
    size_bytes: int = 0
    followers: int = 0
    listed: bool = True

    @property
    def id(self) -> str:
        """Id of the response."""
        return self.response["id"]

    @property
    def token(self) -> str:
        """The random text in its id and in those of its items."""
        return self.id.removeprefix(RESPONSE_PREFIX)

    @property
    def kept(self) -> bool:
        """Whether it can be found, or one that continues it can."""
        return self.listed or self.followers > 0

    @property
    def running(self) -> bool:
        """Whether it is not over."""
        return self.response["status"] in RUNNING

    def output(self) -> list[Item]:
        """Its output, reasoning items with what leads back to their turn."""
        return [
            {**item, "encrypted_content": self.signature} if item["type"] == "reasoning" else item
            for item in self.response["output"]
        ]

    def input(self) -> list[Item]:
        """Everything that the model was given, the instructions aside."""
        before = self.previous.conversation() if self.previous is not None else []
        return [*before, *self.items]

    def conversation(self) -> list[Item]:
        """Input and output: what a response that continues this one goes on from."""
        chain: list[Stored] = []
        stored: Stored | None = self
        while stored is not None:
            chain.append(stored)
            stored = stored.previous
        return [item for link in reversed(chain) for item in (*link.items, *link.output())]


@dataclass(slots=True)
class ResponseStore:
    """Kept responses by id; the one unused for longest goes first, never one that runs. For one event loop."""

    max_responses: int
    max_bytes: int
    _listed: "OrderedDict[str, Stored]" = field(default_factory=lambda: OrderedDict[str, Stored]())
    _items: dict[str, Item] = field(default_factory=dict[str, Item])
    _bytes: int = 0

    def add(self, stored: Stored) -> None:
        """Keep a response that has begun."""
        self._listed[stored.id] = stored
        self._hold(stored.previous)
        self._count(stored)
        self._index(stored, stored.items)
        self._keep_bounds()

    def update(self, stored: Stored, response: Json) -> None:
        """The response has changed."""
        stored.response = response
        self._count(stored)
        if stored.listed:
            self._index(stored, stored.output())
        self._keep_bounds()

    def find(self, name: str) -> Stored | None:
        """A response by its id; counts as a use."""
        stored = self._listed.get(name)
        if stored is not None:
            self._listed.move_to_end(name)
        return stored

    def find_item(self, name: str) -> Item | None:
        """An item of a kept response, by the id it was given here."""
        return self._items.get(name)

    def remove(self, stored: Stored) -> None:
        """Find it no more; its content goes when no kept response continues it."""
        del self._listed[stored.id]
        stored.listed = False
        for item in (*stored.items, *stored.response["output"]):
            if stored.token in item["id"]:
                self._items.pop(item["id"], None)
        freed: Stored | None = stored
        while freed is not None and not freed.kept:
            self._bytes -= freed.size_bytes
            freed = freed.previous
            if freed is not None:
                freed.followers -= 1

    @property
    def bytes(self) -> int:
        """Size of all that is kept, as JSON."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._listed)

    def _hold(self, stored: Stored | None) -> None:
        """One more response continues this one, which may have gone while that one was prepared."""
        while stored is not None:
            is_kept = stored.kept
            stored.followers += 1
            if is_kept:
                return
            self._bytes += stored.size_bytes
            stored = stored.previous

    def _index(self, stored: Stored, items: Sequence[Item]) -> None:
        # Only ids made here lead to an item: a client must not be able to put its own in the place of another's.
        self._items.update((item["id"], item) for item in items if stored.token in item["id"])

    def _count(self, stored: Stored) -> None:
        stored.items_bytes = stored.items_bytes or _json_bytes(stored.items)  # they never change
        size_bytes = stored.items_bytes + _json_bytes(stored.response)
        if stored.kept:  # else it was deleted while it ran
            self._bytes += size_bytes - stored.size_bytes
        stored.size_bytes = size_bytes

    def _keep_bounds(self) -> None:
        oldest = [stored for stored in self._listed.values() if not stored.running] if self._too_much() else []
        for stored in oldest:
            if not self._too_much():
                return
            self.remove(stored)

    def _too_much(self) -> bool:
        return self._bytes > self.max_bytes or len(self._listed) > self.max_responses


def _json_bytes(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())
