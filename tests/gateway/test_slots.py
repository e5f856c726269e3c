"""Slots are never lost and never too many, whoever comes, waits, leaves or is cancelled; owners take turns."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.gateway.errors import ApiError
from agent_runtime.gateway.settings import GatewaySettings
from agent_runtime.gateway.slots import Slot, Slots

OWNERS = ("ann", "bob", "carl")


def slots(**fields: Any) -> Slots:
    """Slots with some bounds."""
    return Slots(GatewaySettings(model="m", tokenizer_dir=Path("/"), context_len=1, **fields))


def running(of: Slots, owner: str) -> int:
    return of.state(owner)["running"]


def test_no_more_run_than_may_and_one_owner_leaves_room_for_the_next() -> None:
    some = slots(max_running=3, max_running_per_key=2, max_waiting=0)
    first = some.take_now("ann")
    assert first is not None and some.take_now("ann") is not None
    with pytest.raises(ApiError, match="2 of your requests run") as raised:
        some.take_now("ann")
    assert (raised.value.status, raised.value.headers) == (429, {"retry-after": "1"})
    assert some.take_now("bob") is not None
    with pytest.raises(ApiError, match="All places to run are taken"):
        some.take_now("bob")
    first.free()
    first.free()
    assert some.take_now("bob") is not None
    assert (running(some, "ann"), running(some, "bob")) == (1, 2)


def test_a_slot_that_is_kept_outlasts_the_answer() -> None:
    some = slots(max_running=1)
    slot = some.take_now("ann")
    assert slot is not None
    slot.keep()
    slot.answered()
    assert running(some, "ann") == 1
    slot.free()
    assert running(some, "ann") == 0


async def test_the_owner_with_the_fewest_running_is_next_and_each_owner_first_come_first_served() -> None:
    some = slots(max_running=2)
    held = [some.take_now("ann"), some.take_now("ann")]
    order: list[str] = []

    async def queue(owner: str, name: str) -> None:
        assert some.take_now(owner) is None
        slot = await some.wait(owner)
        assert slot is not None
        order.append(name)
        await asyncio.sleep(0)
        slot.free()

    async with anyio.create_task_group() as tasks:
        for owner, name in (("ann", "a1"), ("ann", "a2"), ("bob", "b1"), ("bob", "b2")):
            tasks.start_soon(queue, owner, name)
            await asyncio.sleep(0)
        assert some.state("ann")["waiting"] == 2
        assert held[0] is not None and held[1] is not None
        held[0].free()
        await anyio.sleep(0.05)
        assert order[0] == "b1"
        held[1].free()
    assert order.index("a1") < order.index("a2") and order.index("b1") < order.index("b2")
    assert all(running(some, owner) == some.state(owner)["waiting"] == 0 for owner in OWNERS)


async def test_one_owner_cannot_fill_the_queue() -> None:
    some = slots(max_running=1, max_waiting=3, max_waiting_per_key=1)
    assert some.take_now("ann") is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(some.wait, "ann")
        await anyio.sleep(0)
        with pytest.raises(ApiError, match="1 more wait"):
            some.take_now("ann")
        assert some.take_now("bob") is None
        tasks.cancel_scope.cancel()
    assert some.state("ann")["waiting"] == 0


async def test_who_waits_too_long_gets_nothing_and_leaves_the_queue() -> None:
    some = slots(max_running=1, max_wait_s=0.01)
    assert some.take_now("ann") is not None
    assert await some.wait("ann") is None
    assert some.state("ann") == {"running": 1, "waiting": 0, "max_running": 1, "max_waiting": 1024}


async def test_a_slot_given_in_the_moment_of_cancellation_is_given_back() -> None:
    some = slots(max_running=1)
    slot = some.take_now("ann")
    assert slot is not None
    task = asyncio.ensure_future(some.wait("bob"))
    await asyncio.sleep(0)
    slot.free()
    assert running(some, "bob") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(some, "bob") == 0 and some.take_now("ann") is not None


@given(st.lists(st.tuples(st.sampled_from(("come", "free", "leave")), st.sampled_from(OWNERS), st.integers(0, 9))))
def test_no_order_of_events_loses_or_makes_a_slot(events: list[tuple[str, str, int]]) -> None:
    asyncio.run(_played(events))


class _Play:
    """Slots, and what a model of them says is held and waits."""

    def __init__(self) -> None:
        self.slots = slots(max_running=4, max_running_per_key=2, max_waiting=5, max_waiting_per_key=3)
        self.held: list[Slot] = []
        self.waiting: list[tuple[str, asyncio.Task[Slot | None]]] = []

    def come(self, owner: str) -> None:
        try:
            slot = self.slots.take_now(owner)
        except ApiError:
            assert sum(name == owner for name, _ in self.waiting) == 3 or len(self.waiting) == 5
            return
        if slot is None:
            self.waiting.append((owner, asyncio.ensure_future(self.slots.wait(owner))))
        else:
            self.held.append(slot)

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for name, task in list(self.waiting):
            if task.done():
                self.waiting.remove((name, task))
                if not task.cancelled() and (slot := task.result()) is not None:
                    self.held.append(slot)

    def check(self) -> None:
        states = {name: self.slots.state(name) for name in OWNERS}
        assert sum(state["running"] for state in states.values()) == len(self.held) <= 4
        assert all(state["running"] <= 2 and state["waiting"] <= 3 for state in states.values())
        assert sum(state["waiting"] for state in states.values()) == len(self.waiting)
        for name, _ in self.waiting:
            assert len(self.held) == 4 or states[name]["running"] == 2, "somebody waits though there is room"


async def _played(events: list[tuple[str, str, int]]) -> None:
    play = _Play()
    for event, owner, which in events:
        if event == "come":
            play.come(owner)
        elif event == "free" and play.held:
            play.held.pop(which % len(play.held)).free()
        elif event == "leave" and play.waiting:
            play.waiting[which % len(play.waiting)][1].cancel()
        await play.settle()
        play.check()
    for _, task in play.waiting:
        task.cancel()
    await asyncio.gather(*(task for _, task in play.waiting), return_exceptions=True)
