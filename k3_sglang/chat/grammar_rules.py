"""EBNF building blocks: rules, literals, character sets and integer ranges."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# Control tokens are spelled in the grammar vocabulary as code points that Unicode does not have, so that
# text rules cannot produce them and ordinary tokens cannot spell them (see K3Tokenizer.grammar_vocabulary).
FIRST_CONTROL_CODE_POINT = 0x1F0000

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

Ranges = Sequence[tuple[int, int]]


def control(offset: int) -> str:
    """A literal for the control token `offset` places after the first one."""
    return f'"\\U{FIRST_CONTROL_CODE_POINT + offset:08X}"'


def literal(text: str) -> str:
    """A literal for exactly this text."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def char_set(ranges: Ranges) -> str:
    """A set of characters given as inclusive code point ranges; what UTF-8 cannot write is left out."""
    parts = (part for low, high in ranges for part in utf8_ranges(low, high))
    return "[" + "".join(f"{_set_char(low)}-{_set_char(high)}" for low, high in parts) + "]"


_SURROGATES = (0xD800, 0xDFFF)
_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


def utf8_ranges(low: int, high: int) -> Iterator[tuple[int, int]]:
    """The range without surrogates, cut so that the UTF-8 of each part is one range per byte.

    xgrammar 0.2.7 turns a range into bytes by its ends only: a range that is no such part accepts overlong forms and
    surrogates, or has beginnings that nothing can follow.
    """
    first, last = _SURROGATES
    if low <= last and high >= first:
        yield from utf8_ranges(low, first - 1) if low < first else ()
        yield from utf8_ranges(last + 1, high) if high > last else ()
        return
    for end in (*_LAST_OF_LENGTH, *_aligned_cuts(low, high)):
        if low <= end < high:
            yield from utf8_ranges(low, end)
            yield from utf8_ranges(end + 1, high)
            return
    yield low, high


def _aligned_cuts(low: int, high: int) -> Iterator[int]:
    """Last code points of the parts in which the trailing bytes of a range would not be free."""
    for bits in (6, 12, 18) if high > _LAST_OF_LENGTH[0] else ():
        mask = (1 << bits) - 1
        if low | mask < high:
            if low & mask:
                yield low | mask
            if high & mask != mask:
                yield (high & ~mask) - 1


def without(ranges: Ranges, points: Iterable[int]) -> list[tuple[int, int]]:
    """The ranges less single code points."""
    left = list(ranges)
    for point in points:
        split: list[tuple[int, int]] = []
        for low, high in left:
            if not low <= point <= high:
                split.append((low, high))
                continue
            if low < point:
                split.append((low, point - 1))
            if point < high:
                split.append((point + 1, high))
        left = split
    return left


def repeat(item: str, low: int, high: int | None) -> str:
    """`item` between `low` and `high` times, without upper limit if `high` is None."""
    if high is None:
        return f"{item}*" if low == 0 else f"{item}{{{low},}}"
    return '""' if high == 0 else f"{item}{{{low},{high}}}"


def choice(alternatives: Iterable[str]) -> str:
    """One of the alternatives, parenthesised."""
    return "(" + " | ".join(alternatives) + ")"


class Rules:
    """A grammar under construction; names are unique and stable for the same construction."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._by_body: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._bodies)

    def reserve(self, hint: str) -> str:
        """A new rule name whose body follows; lets rules refer to themselves."""
        name = f"{hint}{len(self._bodies)}"
        self._bodies[name] = '""'
        return name

    def define(self, name: str, body: str) -> str:
        """Give a reserved rule its body."""
        self._bodies[name] = body
        return name

    def add(self, hint: str, body: str) -> str:
        """A rule with this body, shared by all who ask for the same body."""
        known = self._by_body.get(body)
        if known is None:
            known = self._by_body[body] = self.define(self.reserve(hint), body)
        return known

    def text(self, root: str) -> str:
        """The grammar with `root` as what must be matched."""
        lines = (f"{name} ::= {body}" for name, body in self._bodies.items())
        return "\n".join((f"root ::= {root}", *lines))


MAX_EXCLUDED_CHARS = 256
"""Longer words are not told apart from others: each character is a rule, and xgrammar takes seconds for thousands."""


def words_except(rules: Rules, words: Iterable[str], alphabet: Ranges) -> str:
    """A rule for non-empty words over `alphabet` that are none of `words`."""
    tree = _Node()
    for word in words:
        if all(any(low <= ord(char) <= high for low, high in alphabet) for char in word):
            node = tree
            for char in word:
                node = node.children.setdefault(char, _Node())
            node.ends_word = True
    rest = repeat(char_set(alphabet), 0, None)

    # Every node before its children, without recursion: names may be long.
    nodes = [tree]
    for node in nodes:
        nodes += node.children.values()
    for node in reversed(nodes):
        parts = [f"{literal(char)} {child.rule}" for char, child in node.children.items()]
        others = without(alphabet, [ord(char) for char in node.children])
        if others:
            parts.append(f"{char_set(others)} {rest}")
        if node is not tree and not node.ends_word:
            parts.append('""')
        node.rule = rules.add("word", choice(parts))
    return tree.rule


@dataclass(slots=True)
class _Node:
    """A common beginning of words."""

    children: "dict[str, _Node]" = field(default_factory=lambda: {})
    ends_word: bool = False
    rule: str = ""


def integers(low: int, high: int) -> str:
    """Decimal integers from `low` to `high` inclusive, without leading zeros."""
    parts: list[str] = []
    if low < 0:
        parts += [f'"-" {part}' for part in _natural_range(max(1, -high), -low)]
    if high >= 0:
        parts += _natural_range(max(0, low), high)
    return choice(parts)


def _natural_range(low: int, high: int) -> list[str]:
    parts: list[str] = []
    while len(str(low)) < len(str(high)):
        top = 10 ** len(str(low)) - 1
        parts += _same_length(str(low), str(top))
        low = top + 1
    return parts + _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> list[str]:
    """Digit strings of one length between two of that length."""
    if not low:
        return [""]
    rest = len(low) - 1
    any_rest = f" [0-9]{{{rest}}}" if rest else ""
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [f"[{low[0]}-{high[0]}]{any_rest}"]
    if low[0] == high[0]:
        return [f'"{low[0]}" {part}' for part in _same_length(low[1:], high[1:])]
    parts = [f'"{low[0]}" {part}' for part in _same_length(low[1:], "9" * rest)]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}]{any_rest}")
    return parts + [f'"{high[0]}" {part}' for part in _same_length("0" * rest, high[1:])]


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    point = ord(char)
    return char if 0x20 <= point < 0x7F else f"\\U{point:08X}"


def _set_char(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\U{point:08X}"
