"""How many requests run at once: slots for all and for each owner, a bounded queue before them, 429 beyond it."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import anyio

from agent_runtime.gateway.errors import RETRY_AFTER_S, ApiError
from agent_runtime.gateway.settings import GatewaySettings


class Slot:
    """A request's right to run. Freed once, however often it is told."""

    def __init__(self, slots: "Slots", owner: str) -> None:
        self._slots: Slots | None = slots
        self._owner = owner
        self._kept = False

    def keep(self) -> None:
        """It outlasts the answer to the request; whoever keeps it frees it."""
        self._kept = True

    def answered(self) -> None:
        """The answer is over, in whatever way."""
        if not self._kept:
            self.free()

    def free(self) -> None:
        """Let another one run."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.give_back(self._owner)


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    turn: anyio.Event = field(default_factory=anyio.Event)


class Slots:
    """The slots of one kind of request. Of those who wait, the owner with the fewest running is next.

    For one event loop.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._max_running = settings.max_running
        self._max_of_owner = settings.max_running_per_key or settings.max_running
        self._max_waiting = settings.max_waiting
        of_owner = settings.max_waiting_per_key
        self._max_waiting_of_owner = settings.max_waiting if of_owner is None else of_owner
        self._max_wait_s = settings.max_wait_s
        self._running: Counter[str] = Counter()
        self._waiting: deque[_Waiter] = deque()

    def take_now(self, owner: str) -> Slot | None:
        """A slot, or None when its owner has to `wait` for one. Raises ApiError 429 when there is no room to wait."""
        if self._has_room(owner):
            self._running[owner] += 1
            return Slot(self, owner)
        of_owner = self._waiting_of(owner)
        if of_owner >= self._max_waiting_of_owner or len(self._waiting) >= self._max_waiting:
            raise self._refusal(owner, f"{of_owner} more wait, which is all that may")
        return None

    async def wait(self, owner: str) -> Slot | None:
        """A slot when its turn has come, None when that took too long. Cancel it to leave the queue."""
        waiter = _Waiter(owner)
        self._waiting.append(waiter)
        try:
            with anyio.move_on_after(self._max_wait_s):
                await waiter.turn.wait()
        except BaseException:
            if waiter.turn.is_set():  # in the moment it was cancelled
                self.give_back(owner)
            raise
        finally:
            if not waiter.turn.is_set():
                self._waiting.remove(waiter)
        return Slot(self, owner) if waiter.turn.is_set() else None

    def waited_too_long(self, owner: str) -> ApiError:
        """What is answered when `wait` returns None."""
        return self._refusal(owner, f"none ended within {self._max_wait_s:g} s")

    def give_back(self, owner: str) -> None:
        """One of an owner's requests is over; who waits gets its place. Only `Slot` calls this."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        while (waiter := self._next()) is not None:
            self._waiting.remove(waiter)
            self._running[waiter.owner] += 1
            waiter.turn.set()

    def state(self, owner: str) -> dict[str, Any]:
        """What an owner has running and waiting, and how much that may be."""
        return {
            "running": self._running[owner],
            "waiting": self._waiting_of(owner),
            "max_running": min(self._max_of_owner, self._max_running),
            "max_waiting": min(self._max_waiting_of_owner, self._max_waiting),
        }

    def _next(self) -> _Waiter | None:
        may_run = [waiter for waiter in self._waiting if self._has_room(waiter.owner)]
        return min(may_run, key=lambda waiter: self._running[waiter.owner], default=None)

    def _has_room(self, owner: str) -> bool:
        return self._running[owner] < self._max_of_owner and self._running.total() < self._max_running

    def _waiting_of(self, owner: str) -> int:
        return sum(waiter.owner == owner for waiter in self._waiting)

    def _refusal(self, owner: str, why: str) -> ApiError:
        running, most = self._running[owner], min(self._max_of_owner, self._max_running)
        reached = f"{running} of your requests run" if running >= most else "All places to run are taken"
        return ApiError(
            429,
            f"{reached} (at most {most} may), and {why}. Wait for one to end, then send it again.",
            code="rate_limit_exceeded",
            type="rate_limit_error",
            headers={"retry-after": str(RETRY_AFTER_S)},
        )
