"""Which checkpoint dies when slots run out: a pure policy over the tree of checkpoints, with an indexed victim choice.

The score of a checkpoint is the log2 of the tokens it is expected to save,

    log2(p(role) * gap) - decay(age),

where ``gap`` is the distance to the next shallower checkpoint and ``age`` is measured in typical reuse intervals of the
very workload (a running mean), so that the policy is as patient as its sessions are slow. The lowest score dies.

``decay`` is concave and made of two straight pieces. Within one piece the order of two checkpoints never changes as
time passes, so each piece is a heap with fixed keys; a checkpoint moves from the first to the second once, at the knee.
Every operation is O(log n) apart from re-parenting the children of a removed or inserted checkpoint.

Time is a count of requests, and the logical clock for expiries comes from the requests themselves: ranks of a
tensor-parallel group see the same requests in the same order and must choose the same victims.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from k3_sglang.cache.types import Checkpoint, Role


@dataclass(frozen=True)
class EvictionSettings:
    """The policy's constants. One set serves every budget; the optimum is flat (docs/cache.md has the sweep)."""

    tip: float = 0.95
    """Nearly every turn of an agent extends the last one."""
    prompt_end: float = 0.25
    """Wanted when reasoning is dropped or the answer comes back in other tokens."""
    superseded: float = 0.01
    """Wanted after an edit of the history. Ten times less loses the shared heads of sessions."""
    fork_per_child: float = 0.1
    """Each path that went on from here is evidence for another."""
    fork_most: float = 0.6
    declared: float = 0.15
    """At least this for a boundary the caller named, whatever the role."""
    released: float = 0.001
    """Multiplies: the session is over, yet somebody may resume it."""
    young_octaves: float = 1.0
    """log2 lost per reuse interval before the knee."""
    knee: float = 4.0
    """Age in reuse intervals from which a session is rather idle than working."""
    old_octaves: float = 0.3
    """log2 lost per reuse interval after the knee: those that return late are missed all the same."""
    reuse_interval: float = 20.0
    """Requests between two uses of a tip, until enough were seen."""
    reuse_weight: float = 0.02
    """Weight of one observation in the running mean."""
    reuse_drift: float = 1.25
    """Queues are rebuilt when the mean has moved by this factor."""
    wait_credit: float = 0.0
    """Share of an announced wait by which a session's age starts later. Replayed sessions with their tools' and users'
    waits announced computed 7 to 10 % more with any credit at 24 slots (whoever is away longest gained most), and at
    best 0.5 % less at 40."""
    pinned_share: float = 0.25
    """At most this share of all checkpoints may be pinned; further pins are treated as declared."""

    def __post_init__(self) -> None:
        if not 0 < self.old_octaves <= self.young_octaves:
            raise ValueError(
                f"old_octaves is {self.old_octaves}, young_octaves {self.young_octaves}; needs 0 < old <= young: "
                "the two queues represent a concave decay"
            )


@dataclass
class _Queue:
    """A heap of (fixed score, node id, version, checkpoint) of one straight piece of the decay."""

    octaves_per_tick: float
    entries: list[tuple[float, int, int, Checkpoint]] = field(default_factory=list[tuple[float, int, int, Checkpoint]])

    def push(self, checkpoint: Checkpoint) -> None:
        fixed = checkpoint.value + checkpoint.last_use * self.octaves_per_tick
        heapq.heappush(self.entries, (fixed, checkpoint.key, checkpoint.version, checkpoint))


class CheckpointIndex:
    """All checkpoints of a tree, their roles and gaps, and the one that is worth least.

    Keys are the tree's node ids. The caller says who is next to whom; the index keeps parents, children and scores.
    """

    def __init__(self, settings: EvictionSettings | None = None) -> None:
        self.settings = settings or EvictionSettings()
        self._by_key: dict[int, Checkpoint] = {}
        self._sequence = 0
        self.tick = 0
        """Requests seen."""
        self.clock_s = 0.0
        """Latest time any request carried."""
        self.reuse_interval = self.settings.reuse_interval
        self._s_per_request = 1.0
        self._pinned: set[int] = set()
        self._knees: list[tuple[float, int, int, Checkpoint]] = []
        self._rebuild()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._by_key.values())

    def get(self, key: int) -> Checkpoint | None:
        """The checkpoint of a node, None if it has none."""
        return self._by_key.get(key)

    # --- structure ------------------------------------------------------------------------------------------------

    def add(
        self,
        key: int,
        depth: int,
        parent: int | None,
        children: Iterable[int] = (),
        *,
        session: str | None = None,
        declared: bool = False,
    ) -> Checkpoint:
        """A new checkpoint between its next shallower and its next deeper ones.

        Raises:
            ValueError: the key is taken, or the depths are not in order.
        """
        if key in self._by_key:
            raise ValueError(f"checkpoint {key} is already there")
        above = self._by_key[parent] if parent is not None else None
        below = {child: self._by_key[child] for child in children}
        if depth <= (above.depth if above is not None else 0) or any(c.depth <= depth for c in below.values()):
            raise ValueError(f"checkpoint {key} at depth {depth} does not lie between its neighbours")
        added = Checkpoint(key, depth, above, below, last_use=float(self.tick), session=session, declared=declared)
        self._by_key[key] = added
        for child in below.values():
            if child.parent is not None:
                del child.parent.children[child.key]
            child.parent = added
        if above is not None:
            above.children[key] = added
        self._score(added)
        self._score_around(added)
        return added

    def remove(self, key: int) -> None:
        """Forget a checkpoint; its children now hang on its parent.

        Raises:
            KeyError: there is none.
        """
        removed = self._by_key.pop(key)
        self._pinned.discard(key)
        removed.version = -1
        above = removed.parent
        if above is not None:
            del above.children[key]
            above.children.update(removed.children)
        for child in removed.children.values():
            child.parent = above
        self._score_around(removed)

    def clear(self) -> None:
        """Forget all checkpoints, as after a flush; time and the measured reuse interval stay."""
        self._by_key.clear()
        self._pinned.clear()
        self._rebuild()

    # --- events ---------------------------------------------------------------------------------------------------

    def begin_request(self, now_s: float | None = None) -> None:
        """A request enters: time passes. ``now_s`` is the time the request itself carries."""
        self.tick += 1
        if now_s is not None and now_s > self.clock_s:
            if self.clock_s > 0:
                weight = self.settings.reuse_weight
                self._s_per_request += ((now_s - self.clock_s) - self._s_per_request) * weight
            self.clock_s = now_s

    def use(self, key: int, session: str | None = None) -> float:
        """A checkpoint was matched; it is as fresh as a new one. Returns its age in requests before that."""
        used = self._by_key[key]
        age = max(0.0, self.tick - used.last_use)
        if session is not None and session != used.session:
            used.shared = used.shared or used.session is not None
            used.session = session
        used.released = False
        used.last_use = max(used.last_use, float(self.tick))
        used.old = False
        self._score(used)
        return age

    def observe_reuse(self, age: float) -> None:
        """A session went on after ``age`` requests: the measure of patience."""
        self.reuse_interval += (max(age, 1.0) - self.reuse_interval) * self.settings.reuse_weight
        drift = self.reuse_interval / self._reuse_in_queues
        if not 1 / self.settings.reuse_drift < drift < self.settings.reuse_drift:
            self._rebuild()

    def expect(self, key: int, wait_s: float) -> None:
        """The session will be back after so many seconds: its age counts from then, at most up to the knee."""
        waiting = self._by_key[key]
        credit = min(wait_s / self._s_per_request, self.settings.knee * self.reuse_interval) * self.settings.wait_credit
        waiting.last_use = self.tick + credit
        waiting.old = False
        self._score(waiting)

    def set_locked(self, key: int, locked: bool) -> None:
        """A running request uses it (never a victim), or no longer."""
        checkpoint = self._by_key[key]
        if checkpoint.locked != locked:
            checkpoint.locked = locked
            self._push(checkpoint)

    def declare(self, key: int) -> None:
        """The caller named this position as a boundary."""
        checkpoint = self._by_key[key]
        if not checkpoint.declared:
            checkpoint.declared = True
            self._score(checkpoint)

    def pin(self, key: int, until_s: float) -> bool:
        """Keep until a logical time. False when the budget is spent; the checkpoint then counts as declared.

        Before that, a pin that its own path has superseded gives way: a client that marks the end of every turn
        wants the last ones.
        """
        self._pinned = {key for key in self._pinned if self._by_key[key].pinned_until_s > self.clock_s}
        checkpoint = self._by_key[key]
        if key not in self._pinned and len(self._pinned) + 1 > self.settings.pinned_share * len(self._by_key):
            superseded = [c for c in map(self._by_key.__getitem__, self._pinned) if c.role is Role.SUPERSEDED]
            if checkpoint.role is Role.SUPERSEDED or not superseded:
                self.declare(key)
                return False
            self.unpin(min(superseded, key=lambda c: (self.score(c), c.key)).key)
        self._pinned.add(key)
        checkpoint.pinned_until_s = until_s
        self._push(checkpoint)
        return True

    def unpin(self, key: int) -> None:
        """End a pin; without one nothing happens. The checkpoint is what its role makes it."""
        checkpoint = self._by_key[key]
        self._pinned.discard(key)
        checkpoint.pinned_until_s = 0.0
        self._push(checkpoint)

    def demote(self, session: str, start: int = 0) -> int:
        """A session has left what it alone has behind ``start`` tokens: as if idle up to the knee. Returns the number.

        Using one of them makes it as fresh as any.
        """
        left = [c for c in self._by_key.values() if c.session == session and not c.shared and c.depth > start]
        at_knee = self.tick - self.settings.knee * self._reuse_in_queues
        left = [checkpoint for checkpoint in left if checkpoint.last_use > at_knee]
        for checkpoint in left:
            checkpoint.last_use = at_knee
            self._score(checkpoint)
        return len(left)

    def release(self, session: str) -> int:
        """A session is over: checkpoints that only it used may go. Returns their number."""
        released = [c for c in self._by_key.values() if c.session == session and not c.shared and not c.released]
        for checkpoint in released:
            checkpoint.released = True
            self._score(checkpoint)
        return len(released)

    # --- victims --------------------------------------------------------------------------------------------------

    def score(self, checkpoint: Checkpoint) -> float:
        """log2 of the tokens a checkpoint is expected to save, now."""
        age = (self.tick - checkpoint.last_use) / self._reuse_in_queues
        settings = self.settings
        if not checkpoint.old:
            return checkpoint.value - settings.young_octaves * age
        at_knee = (settings.young_octaves - settings.old_octaves) * settings.knee
        return checkpoint.value - settings.old_octaves * age - at_knee

    def victim(self, spared: Collection[int] = ()) -> Checkpoint | None:
        """The unlocked, unpinned checkpoint worth least, None if there is none. It stays in the index."""
        self._age()
        held: list[tuple[_Queue, Checkpoint]] = []
        found: Checkpoint | None = None
        while found is None:
            tops = [top for queue in (self._young, self._old) if (top := self._top(queue)) is not None]
            if not tops:
                break
            queue, best = min(tops, key=lambda top: (self.score(top[1]), top[1].last_use, top[1].key))
            if best.key in spared or best.pinned_until_s > self.clock_s:
                heapq.heappop(queue.entries)
                held.append((queue, best))
            else:
                found = best
        for queue, checkpoint in held:
            queue.push(checkpoint)
        return found

    def _top(self, queue: _Queue) -> tuple[_Queue, Checkpoint] | None:
        """The valid entry with the lowest key; stale and locked ones are dropped (unlocking pushes again)."""
        while queue.entries:
            _, _, version, checkpoint = queue.entries[0]
            if version == checkpoint.version and not checkpoint.locked:
                return queue, checkpoint
            heapq.heappop(queue.entries)
        return None

    # --- upkeep ---------------------------------------------------------------------------------------------------

    def _score_around(self, checkpoint: Checkpoint) -> None:
        """Roles depend on two generations below, gaps on the one above."""
        for child in checkpoint.children.values():
            self._score(child)
        above = checkpoint.parent
        for _ in range(2):
            if above is not None:
                self._score(above)
                above = above.parent

    def _score(self, checkpoint: Checkpoint) -> None:
        settings = self.settings
        role = checkpoint.role
        if role is Role.TIP:
            chance = settings.tip
        elif role is Role.PROMPT_END:
            chance = settings.prompt_end
        elif role is Role.SUPERSEDED:
            chance = settings.superseded
        else:
            chance = min(settings.fork_per_child * len(checkpoint.children), settings.fork_most)
        if checkpoint.declared:
            chance = max(chance, settings.declared)
        if checkpoint.released:
            chance *= settings.released
        checkpoint.value = math.log2(chance * checkpoint.gap)
        self._push(checkpoint)

    def _push(self, checkpoint: Checkpoint) -> None:
        self._sequence += 1
        checkpoint.version = self._sequence
        if checkpoint.locked:
            return
        if checkpoint.old:
            self._old.push(checkpoint)
        else:
            self._young.push(checkpoint)
            knee = checkpoint.last_use + self.settings.knee * self._reuse_in_queues
            heapq.heappush(self._knees, (knee, checkpoint.key, checkpoint.version, checkpoint))
        if self._sequence - self._sequence_at_rebuild > 8 * len(self._by_key) + 1024:
            self._rebuild()  # drops stale entries: memory stays within a multiple of the checkpoints

    def _age(self) -> None:
        """Move checkpoints past the knee to the other queue."""
        while self._knees and self._knees[0][0] <= self.tick:
            _, _, version, checkpoint = heapq.heappop(self._knees)
            if version == checkpoint.version and not checkpoint.old:
                checkpoint.old = True
                self._push(checkpoint)

    def _rebuild(self) -> None:
        self._reuse_in_queues = self.reuse_interval
        self._young = _Queue(self.settings.young_octaves / self._reuse_in_queues)
        self._old = _Queue(self.settings.old_octaves / self._reuse_in_queues)
        self._knees = []
        self._sequence_at_rebuild = self._sequence + len(self._by_key)
        for checkpoint in self._by_key.values():
            checkpoint.old = self.tick - checkpoint.last_use >= self.settings.knee * self._reuse_in_queues
            self._push(checkpoint)
