"""The token-exact invariant: a prompt begins with the one before it and its output; if not, what moved and its cost."""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock

from agent_runtime.guard.fingerprint import turn_text
from agent_runtime.guard.verdict import Extension, Moved
from k3_sglang.chat.canonical import canonical_json
from k3_sglang.chat.encode import EncodedPart
from k3_sglang.chat.types import ChatRequest, ImagePart, JSONObject, Message

MAX_TIPS = 256
MAX_TOKENS = 16_000_000
"""Bounds of the prompts that are kept for comparison: at most 8 bytes a token, less what the encoder remembers too."""
MAX_NAMES = 5

_DAYS_AND_MONTHS = "mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_TIME = re.compile(rf"\d{{1,4}}[-/.:]\d{{1,2}}|\b(?:{_DAYS_AND_MONTHS})", re.I)
_TASKS = re.compile(r"^\s*(?:[-*]\s*)?\[[ xX~-]\]|\b(?:todo|pending|in_progress|completed|done)\b", re.I | re.M)
_AROUND_CHARS = 24


@dataclass(frozen=True, slots=True)
class Tip:
    """A prompt and what was generated from it. ``request`` and ``indices`` say which message each part is."""

    parts: Sequence[EncodedPart]
    request: ChatRequest | None
    indices: Sequence[int]
    output: Sequence[int]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output."""
        return sum(len(part.ids) for part in self.parts) + len(self.output)


class Tips:
    """The latest prompts by the turn generated from them; the one unused for longest goes first. Thread-safe."""

    def __init__(self) -> None:
        self._tips: OrderedDict[int, Tip] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def keep(self, turn: int, tip: Tip) -> None:
        """Remember the prompt of a turn."""
        with self._lock:
            self._tips[turn] = tip
            self._tokens += tip.tokens
            while len(self._tips) > 1 and (self._tokens > MAX_TOKENS or len(self._tips) > MAX_TIPS):
                _, gone = self._tips.popitem(last=False)
                self._tokens -= gone.tokens

    def find(self, turn: int) -> Tip | None:
        """The prompt a turn was generated from."""
        with self._lock:
            if turn in self._tips:
                self._tips.move_to_end(turn)
            return self._tips.get(turn)

    def peek(self, turn: int) -> Tip | None:
        """The same without counting as a use."""
        with self._lock:
            return self._tips.get(turn)


def extension(tip: Tip, request: ChatRequest, indices: Sequence[int], parts: Sequence[EncodedPart]) -> Extension:
    """Compare a prompt with the one it goes on from. ``indices`` are the places at which its messages were received."""
    history = history_parts(tip.parts)
    same = 0
    common = 0
    has_pictures = any(isinstance(message.content, tuple) for message in request.messages)
    for old, new in zip(tip.parts[:history], parts, strict=False):
        known = old.ids is new.ids or _is_same_turn(tip.request, old, request, new)
        if not known and not _equal(old.ids, new.ids):
            break
        if has_pictures and _pictures(tip.request, old) != _pictures(request, new):
            break
        common += len(old.ids)
        same += 1
    expected = chain.from_iterable(part.ids for part in tip.parts[same:])
    found = chain.from_iterable(part.ids for part in parts[same:])
    common += _common(chain(expected, tip.output), found)
    if common == tip.tokens:
        return Extension(True)
    kind, index, detail = _moved(tip, request, indices, parts, same, history)
    return Extension(False, kind, index, detail, common, tip.tokens - common)


def history_parts(parts: Sequence[EncodedPart]) -> int:
    """Parts up to the last message; then come instructions for one turn and the generation prompt."""
    for place in range(len(parts), 0, -1):
        if parts[place - 1].message is not None:
            return place
    return len(parts)


def _is_same_turn(before: ChatRequest | None, old: EncodedPart, request: ChatRequest, new: EncodedPart) -> bool:
    """Whether two parts are one recorded turn, which need not be compared id by id: nothing else says what they are."""
    if before is None or old.message is None or new.message is None or before.thinking != request.thinking:
        return False
    turn = request.messages[new.message]
    return turn.recorded_ids is not None and before.messages[old.message] is turn


def _equal(old: Sequence[int], new: Sequence[int]) -> bool:
    return old == new or (len(old) == len(new) and list(old) == list(new))


def _pictures(request: ChatRequest | None, part: EncodedPart) -> tuple[bytes, ...]:
    """What the ids do not say: images of one size have the same."""
    content = request.messages[part.message].content if request is not None and part.message is not None else None
    if not isinstance(content, tuple):
        return ()
    return tuple(piece.digest for piece in content if isinstance(piece, ImagePart))


def _common(expected: Iterator[int], found: Iterator[int]) -> int:
    count = 0
    for old, new in zip(expected, found, strict=False):
        if old != new:
            break
        count += 1
    return count


def _moved(
    tip: Tip, request: ChatRequest, indices: Sequence[int], parts: Sequence[EncodedPart], same: int, history: int
) -> tuple[Moved, int | None, str]:
    """Name the first part that is not as it was."""
    before = tip.request
    if before is None:
        return "unknown", None, "the prompt before is known by its ids only"
    if same == history:
        return _after_history(tip, request, indices, parts, same)
    if list(map(canonical_json, before.tools)) != list(map(canonical_json, request.tools)):
        return _tools(before.tools, request.tools)
    if (before.thinking, before.effort) != (request.thinking, request.effort):
        return "effort", None, f"{_effort(before)} -> {_effort(request)}"
    old = tip.parts[same].message
    new = parts[same].message if same < len(parts) else None
    if old is None or new is None:
        return "left_out", None if old is None else tip.indices[old], "the history ends before it did"
    return _message(before.messages[old], request.messages[new], indices[new])


def _after_history(
    tip: Tip, request: ChatRequest, indices: Sequence[int], parts: Sequence[EncodedPart], same: int
) -> tuple[Moved, int | None, str]:
    """All that preceded the turn is as it was, so it is the turn itself, or an instruction that was for it only."""
    place = parts[same].message if same < len(parts) else None
    index = None if place is None else indices[place]
    if len(tip.parts) - history_parts(tip.parts) > 1:
        return "one_shot", index, "tool_choice or response_format stood behind the history, for one turn"
    if place is not None and request.messages[place].role == "assistant":
        if request.messages[place].recorded_ids is None:
            return "turn", index, "the turn is rendered from its text"
        return "violation", index, "the turn is replayed by its ids, and the prompt does not begin as it did"
    return "turn", index, "the turn that was generated is not in the history"


def _tools(before: Sequence[JSONObject], now: Sequence[JSONObject]) -> tuple[Moved, None, str]:
    old, new = _by_name(before), _by_name(now)
    if sorted(old.values()) == sorted(new.values()):
        return "tools_order", None, "the same tools in another order"
    changes = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and old[name] != new[name]],
    }
    return "tools", None, "; ".join(f"{what}: {_some(names)}" for what, names in changes.items() if names)


def _by_name(tools: Iterable[JSONObject]) -> dict[str, str]:
    return {str(tool.get("function", tool).get("name")): canonical_json(tool) for tool in tools}


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(name[:64] for name in names[:MAX_NAMES]) + more


def _effort(request: ChatRequest) -> str:
    return str(request.effort) if request.thinking else "thinking off"


def _message(old: Message, new: Message, index: int) -> tuple[Moved, int, str]:
    if old.role != new.role:
        return "message", index, f"a {new.role} message where a {old.role} message was"
    if new.role == "assistant":
        return "turn", index, "the turn is not as it was"
    if new.role == "system":
        before, now = turn_text(old.content) or "", turn_text(new.content) or ""
        return _system_text(before, now), index, "the system text is not as it was"
    return "message", index, f"the {new.role} message is not as it was"


def _system_text(before: str, now: str) -> Moved:
    """What kind of volatile text it is: what keeps changing near the head costs the whole prefix, every time."""
    start = _common(iter(_codes(before)), iter(_codes(now)))
    end = _common(iter(_codes(before[start:][::-1])), iter(_codes(now[start:][::-1])))
    changed = now[max(0, start - _AROUND_CHARS) : len(now) - end + _AROUND_CHARS]
    if _TASKS.search(changed):
        return "system_task_list"
    return "system_timestamp" if _TIME.search(changed) else "system_text"


def _codes(text: str) -> list[int]:
    return list(map(ord, text))
