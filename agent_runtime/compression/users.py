"""Which user messages stay word for word: the oldest and the newest within a budget, cut at the edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """Texts that stay, in their order."""

    texts: tuple[str, ...]
    elided_after: int
    """Position in `texts` behind which something is missing; `len(texts)` when nothing is."""
    elided_tokens: int
    """Tokens that are missing."""


def keep_user_texts(texts: Sequence[str], head_tokens: int, all_tokens: int, size: Callable[[str], int]) -> KeptTexts:
    """All texts when they fit into `all_tokens`; else the first up to `head_tokens` and the last up to the rest.

    The text at the edge of the head keeps its beginning, the one at the edge of the tail its end.
    """
    sizes = [size(text) for text in texts]
    if sum(sizes) <= all_tokens:
        return KeptTexts(tuple(texts), len(texts), 0)
    head, used = _take(list(texts), sizes, head_tokens, "start", size)
    rest, rest_sizes = list(texts[used:]), sizes[used:]
    if head and head[-1] != texts[used - 1]:
        # What the head left of the text at its edge may still stand in the tail.
        left = texts[used - 1][len(head[-1]) :]
        if left.strip():
            rest, rest_sizes = [left, *rest], [size(left), *rest_sizes]
    tail, _ = _take(rest[::-1], rest_sizes[::-1], all_tokens - head_tokens, "end", size)
    kept = (*head, *reversed(tail))
    return KeptTexts(kept, len(head), max(0, sum(sizes) - sum(size(text) for text in kept)))


def cut_text(text: str, tokens: int, keep: Literal["start", "end"], size: Callable[[str], int]) -> str:
    """The longest start or end of a text that bisection finds to fit into so many tokens; "" when none does."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if size(_part(text, middle, keep)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return _part(text, low, keep)


def _take(
    texts: Sequence[str], sizes: Sequence[int], budget: int, keep: Literal["start", "end"], size: Callable[[str], int]
) -> tuple[list[str], int]:
    """Texts from the front within a budget, the last one cut, and how many of the texts that used."""
    taken: list[str] = []
    for used, (text, tokens) in enumerate(zip(texts, sizes, strict=True)):
        if tokens > budget:
            cut = cut_text(text, budget, keep, size)
            if cut.strip():
                return [*taken, cut], used + 1
            return taken, used
        taken.append(text)
        budget -= tokens
    return taken, len(texts)


def _part(text: str, chars: int, keep: Literal["start", "end"]) -> str:
    return text[:chars] if keep == "start" else text[len(text) - chars :]
