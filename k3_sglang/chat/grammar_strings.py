"""Rules for strings, written so that the grammar engine masks a large vocabulary in little time."""

from k3_sglang.chat.grammar_rules import Ranges, Rules, char_set, repeat

# Surrogates are no characters: bytes that spell one are not UTF-8 and would be read as several replacements.
TEXT: Ranges = ((0x00, 0xD7FF), (0xE000, 0x10FFFF))
JSON_CHARS: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF))
"""Characters of a JSON string that stand for themselves."""

_QUOTE = '"\\""'
_BACKSLASH = '"\\\\"'
_ESCAPED = '(["\\\\/bfnrt] | "u" [0-9a-fA-F]{4})'

# Each counted character is a state in which the engine tries every token of the vocabulary before it starts: 0.1 s
# with 160,000 of them.
_MAX_COUNTED_CHARS = 16
_MAX_ALL_COUNTED_CHARS = 64


class CountedLengths:
    """Decides which string lengths the rules of one request count; equal lengths share their rules."""

    def __init__(self) -> None:
        self._left = _MAX_ALL_COUNTED_CHARS
        self._counted: set[tuple[int, int | None]] = set()

    def countable(self, low: int, high: int | None) -> tuple[int, int | None]:
        """The lengths that may be counted; what is given up is 0 or None."""
        low = low if low <= _MAX_COUNTED_CHARS else 0
        high = high if high is not None and high <= _MAX_COUNTED_CHARS else None
        if (low, high) not in self._counted:
            chars = low if high is None else high
            if chars > self._left:
                return 0, None
            self._left -= chars
            self._counted.add((low, high))
        return low, high


def json_string(rules: Rules, low: int, high: int | None) -> str:
    """A rule for a JSON string of `low` to `high` characters, an escape being one; no upper limit if `high` is None.

    Behind an escape stands the rest of the string, as a rule of its own. A repeated choice of character and escape
    says the same, but in that the engine tries all tokens anew at every step: 0.2 s with 160,000 of them.
    """
    char = char_set(JSON_CHARS)
    escape = f"{_BACKSLASH} {rules.add('escaped', _ESCAPED)}"
    if high is None:
        rest = rules.define("rest_of_string", f"{char}* ({_QUOTE} | {escape} rest_of_string)")
    else:
        rest = rules.add("chars", _QUOTE)
        for _ in range(high - low):
            rest = rules.add("chars", f"{_QUOTE} | {char} {rest} | {escape} {rest}")
    for _ in range(low):
        rest = rules.add("chars", f"{char} {rest} | {escape} {rest}")
    return rules.add("string", f"{_QUOTE} {rest}")


def raw_string(rules: Rules, low: int, high: int | None) -> str:
    """A rule for `low` to `high` characters of any kind, without upper limit if `high` is None."""
    char = char_set(TEXT)
    if high is None:
        return rules.add("raw", " ".join([char] * low + [repeat(char, 0, None)]))
    rest = rules.add("raw", '""')
    for _ in range(high - low):
        rest = rules.add("raw", f'"" | {char} {rest}')
    for _ in range(low):
        rest = rules.add("raw", f"{char} {rest}")
    return rest
