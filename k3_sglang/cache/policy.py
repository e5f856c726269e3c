"""Which checkpoint dies when slots run out: a pure policy over the tree of checkpoints, with an indexed victim choice.

The score of a checkpoint is the log2 of the tokens it is expected to save in the near future,

    log2(p(role) * gap) - decay(age),

where ``gap`` is the distance to the next shallower checkpoint and ``age`` counts requests since its *path* was used: an
edit of the history comes from a session that is at work, however long ago its older checkpoints were made. The lowest
score dies.

Sessions return with a hazard that falls as one over the time they have been away, once that is more than a typical
pause. So ``decay`` is log2(1 + age / pause), made of straight pieces between ages of 0, 1, 3, 7, ... pauses. Within a
piece the order of two checkpoints never changes as time passes, so each piece is a heap with fixed keys. Ages only grow
(which lowers a score, but by less than the piece says) or return to zero (which raises it): what a heap says is never
more than the true score, and an entry that comes up too early is put where it belongs. Choosing a victim is O(log n),
amortised; adding and removing cost one step per checkpoint of the path.

Time is a count of requests, and the logical clock for expiries comes from the requests themselves: ranks of a
tensor-parallel group see the same requests in the same order and must choose the same victims.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator

from k3_sglang.cache.chances import EvictionSettings, chance
from k3_sglang.cache.types import Checkpoint, Role

NUM_PIECES = 24
"""Straight pieces of the decay; the last one begins at 8 million pauses."""

Entry = tuple[float, int, int, float, Checkpoint]
"""Fixed score, node id, version, last use at the time of entry, checkpoint."""

Order = list[list[Entry]]
"""Checkpoints in the order of eviction: a heap per piece. Entries with another version are stale."""


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
        self.pause = self._pause_in_heaps = self.settings.pause
        """Running median of how many requests pass until a session returns to its tip."""
        self._pinned: set[int] = set()
        self._tip_of: dict[str, int] = {}
        """Where each session went on last."""
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
        self._touch(added)
        self._score(added)
        self._score_around(added)
        self._follow(session, added)
        return added

    def remove(self, key: int) -> None:
        """Forget a checkpoint; its children now hang on its parent.

        Raises:
            KeyError: there is none.
        """
        removed = self._by_key.pop(key)
        self._pinned.discard(key)
        if removed.session is not None and self._tip_of.get(removed.session) == key:
            del self._tip_of[removed.session]
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
        self._tip_of.clear()
        self._rebuild()

    # --- events ---------------------------------------------------------------------------------------------------

    def begin_request(self, now_s: float | None = None) -> None:
        """A request enters: time passes. ``now_s`` is the time the request itself carries."""
        self.tick += 1
        self.clock_s = max(self.clock_s, now_s or 0.0)

    def use(self, key: int, session: str | None = None) -> float:
        """A checkpoint was matched or made again; its path is fresh. Returns its age in requests before that."""
        used = self._by_key[key]
        age = max(0.0, self.tick - used.last_use)
        if session is not None and session != used.session:
            used.shared = used.shared or used.session is not None
            used.session = session
        self._touch(used)
        if used.released or used.waits:
            used.released = used.waits = False
            self._score(used)
        if session is None:
            self._leave_below(used)
        self._follow(session, used)
        return age

    def observe_reuse(self, age: float) -> None:
        """A session went on after ``age`` requests: the measure of patience."""
        step = 1.0 + self.settings.pause_weight
        self.pause = max(self.pause * step if age > self.pause else self.pause / step, 1.0)
        drift = self.pause / self._pause_in_heaps
        if not 1 / self.settings.pause_drift < drift < self.settings.pause_drift:
            self._pause_in_heaps = self.pause
            self._rebuild()

    def expect(self, key: int, wait_s: float) -> None:
        """The session will be back after so many seconds. Only long waits say something."""
        waiting = self._by_key[key]
        waiting.waits = wait_s >= self.settings.long_wait_s
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
        """A session has left what it alone has behind ``start`` tokens, as it says. Returns the number that is new.

        A use of one of them takes it back.
        """
        own = [c for c in self._by_key.values() if c.session == session and not c.shared and not c.left]
        demoted = [checkpoint for checkpoint in own if checkpoint.depth > start]
        for checkpoint in demoted:
            checkpoint.left = True
            self._score(checkpoint)
        return len(demoted)

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
        return checkpoint.value - self._decay(self.tick - checkpoint.last_use)

    def victim(self, spared: Collection[int] = ()) -> Checkpoint | None:
        """The unlocked, unpinned checkpoint worth least, None if there is none. It stays in the index."""
        return self._first(self._states, spared)

    def kv_victim(self, spared: Collection[int] = ()) -> Checkpoint | None:
        """The unlocked, unpinned tip whose KV is worth least per token, None if there is none.

        Dropping a tip's KV frees about as many tokens as its gap, so a token of it saves what the tip's chance says.
        """
        return self._first(self._tips, spared)

    def _first(self, order: Order, spared: Collection[int]) -> Checkpoint | None:
        held: list[tuple[int, Entry]] = []
        found: Checkpoint | None = None
        while found is None:
            while any([self._settle(order, piece) for piece, heap in enumerate(order) if heap]):
                pass
            tops = [
                (heap[0][0] - self._ahead(piece), heap[0][3], heap[0][1], piece)
                for piece, heap in enumerate(order)
                if heap
            ]
            if not tops:
                break
            piece = min(tops)[3]
            best = order[piece][0][4]
            if best.key in spared or best.pinned_until_s > self.clock_s:
                held.append((piece, heapq.heappop(order[piece])))
            else:
                found = best
        for piece, entry in held:
            heapq.heappush(order[piece], entry)
        return found

    def _settle(self, order: Order, piece: int) -> bool:
        """Bring a true entry to the top of a heap: stale and locked ones go (unlocking pushes again), those of another
        age by now move to their own heap. Whether one moved."""
        heap, moved = order[piece], False
        while heap:
            _, _, version, last_use, checkpoint = heap[0]
            if version == checkpoint.version and not checkpoint.locked:
                if last_use == checkpoint.last_use and self._piece(self.tick - last_use) == piece:
                    break
                moved = True
                heapq.heappop(heap)
                self._enter(order, checkpoint)
            else:
                heapq.heappop(heap)
        return moved

    # --- decay ----------------------------------------------------------------------------------------------------

    def _piece(self, age: float) -> int:
        """The straight piece an age lies in: 0 up to one pause, 1 up to three, 2 up to seven, ..."""
        pauses = age / (self._pause_in_heaps * self.settings.pauses)
        return min(int(math.log2(1.0 + pauses)), NUM_PIECES - 1)

    def _slope(self, piece: int) -> float:
        """Octaves lost per request within a piece."""
        return self.settings.octaves / (self._pause_in_heaps * self.settings.pauses * (1 << piece))

    def _decay(self, age: float) -> float:
        piece = self._piece(age)
        begins = self._pause_in_heaps * self.settings.pauses * ((1 << piece) - 1)
        return self.settings.octaves * piece + (age - begins) * self._slope(piece)

    def _ahead(self, piece: int) -> float:
        """What fixed scores of a piece are ahead of the scores now."""
        begins = self._pause_in_heaps * self.settings.pauses * ((1 << piece) - 1)
        return self.settings.octaves * piece + (self.tick - begins) * self._slope(piece)

    # --- upkeep ---------------------------------------------------------------------------------------------------

    def _touch(self, checkpoint: Checkpoint) -> None:
        """The path down to here is used now; heaps learn of it when the entries come up."""
        at: Checkpoint | None = checkpoint
        while at is not None:
            at.last_use = float(self.tick)
            if at.left:
                at.left = False
                self._score(at)
            at = at.parent

    def _leave_below(self, used: Checkpoint) -> None:
        """Somebody used a checkpoint and not the one below it, so goes another way: most likely who made both."""
        at = used
        while len(at.children) == 1:
            (at,) = at.children.values()
            if at.locked:
                break
            at.left = True
            self._score(at)

    def _follow(self, session: str | None, checkpoint: Checkpoint) -> None:
        """A session is here now. Where it was before it has left, unless that lies above or others use it, too."""
        if session is None:
            return
        before = self._by_key.get(self._tip_of.get(session, -1))
        self._tip_of[session] = checkpoint.key
        if len(self._tip_of) > 4 * len(self._by_key) + 1024:
            self._tip_of = {name: key for name, key in self._tip_of.items() if key in self._by_key}
        if before is None or before is checkpoint:
            return
        above: set[int] = set()
        at: Checkpoint | None = checkpoint
        while at is not None:
            above.add(at.key)
            at = at.parent
        while before is not None and before.key not in above and self._belongs(before, session):
            before.left = True
            self._score(before)
            before = before.parent

    def _belongs(self, checkpoint: Checkpoint, session: str) -> bool:
        return checkpoint.session == session and not checkpoint.shared and len(checkpoint.children) < 2

    def _score_around(self, checkpoint: Checkpoint) -> None:
        """Chances depend on three generations below, gaps on the one above."""
        for child in checkpoint.children.values():
            self._score(child)
        above = checkpoint.parent
        for _ in range(3):
            if above is not None:
                self._score(above)
                above = above.parent

    def _score(self, checkpoint: Checkpoint) -> None:
        checkpoint.chance = math.log2(chance(checkpoint, self.settings))
        checkpoint.value = checkpoint.chance + math.log2(checkpoint.gap)
        self._push(checkpoint)

    def _push(self, checkpoint: Checkpoint) -> None:
        self._sequence += 1
        checkpoint.version = self._sequence
        if checkpoint.locked:
            return
        self._enter(self._states, checkpoint)
        if not checkpoint.children:
            self._enter(self._tips, checkpoint)
        if self._sequence - self._sequence_at_rebuild > 8 * len(self._by_key) + 1024:
            self._rebuild()  # drops stale entries: memory stays within a multiple of the checkpoints

    def _enter(self, order: Order, checkpoint: Checkpoint) -> None:
        piece = self._piece(self.tick - checkpoint.last_use)
        value = checkpoint.value if order is self._states else checkpoint.chance
        fixed = value + checkpoint.last_use * self._slope(piece)
        entry = (fixed, checkpoint.key, checkpoint.version, checkpoint.last_use, checkpoint)
        heapq.heappush(order[piece], entry)

    def _rebuild(self) -> None:
        self._states: Order = [[] for _ in range(NUM_PIECES)]
        self._tips: Order = [[] for _ in range(NUM_PIECES)]
        self._sequence_at_rebuild = self._sequence + len(self._by_key)
        for checkpoint in self._by_key.values():
            self._push(checkpoint)
