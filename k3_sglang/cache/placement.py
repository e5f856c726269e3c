"""Where a prefill is cut into chunks: every chunk's final state is a checkpoint, so a cut is how one is placed.

Pure arithmetic. A cut costs one more forward pass; it is made when the tokens it is expected to save are more than
the tokens that could have been computed in the time such a pass takes on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a position is wanted."""

    HEAD = "head"
    """End of the head that sessions share, named by the caller."""
    BOUNDARY = "boundary"
    """Another position the caller named."""
    FAN_OUT = "fan_out"
    """Other requests wait for exactly this checkpoint."""
    FORK = "fork"
    """Another path left the tree here: its KV is there, its state is not."""
    PROMPT_END = "prompt_end"
    """The last whole page of a prompt that ends within a page."""


@dataclass(frozen=True)
class PlacementSettings:
    """The cost model. Probabilities are of one later request that starts at the position and no deeper."""

    pass_tokens: int = 256
    """Tokens computed in the time one more pass takes by itself (weights are read once more, kernels launched)."""
    head: float = 0.5
    boundary: float = 0.25
    fork: float = 0.5
    """The position was left once already by the request that computes it now."""
    prompt_end: float = 0.5
    """An answer that crosses no page, or comes back changed, is continued from here."""
    fan_out: float = 1.0
    most_wait_rounds: int = 256
    """Scheduling rounds for which a request waits for one that computes their common beginning."""

    def chance(self, reason: Reason) -> float:
        """Probability that a checkpoint placed for a reason will be used."""
        return {
            Reason.HEAD: self.head,
            Reason.BOUNDARY: self.boundary,
            Reason.FORK: self.fork,
            Reason.PROMPT_END: self.prompt_end,
            Reason.FAN_OUT: self.fan_out,
        }[reason]


@dataclass(frozen=True)
class Wanted:
    """A position worth a checkpoint, in tokens from the start of the prompt."""

    position: int
    reason: Reason


@dataclass(frozen=True)
class Plan:
    """Ends of the chunks of one prefill, ascending; the last one is the end of the prompt."""

    ends: tuple[int, ...]
    refused: int
    """Wanted positions that did not pay for a pass."""


def next_end(
    start: int,
    limit: int,
    wanted: Iterable[Wanted],
    settings: PlacementSettings,
    grid: int = 1,
    origin: int | None = None,
) -> tuple[int, int]:
    """End of the chunk that starts at ``start`` and may reach up to ``limit``.

    Args:
        start: tokens computed or reused so far; also where the deepest checkpoint of this path lies.
        limit: where the scheduler would end the chunk.
        grid: states can be kept at multiples of this; positions are rounded down to it.
        origin: where the grid begins; None is ``start``.

    Returns:
        The end, and the number of wanted positions before ``limit`` that were refused as too dear.
    """
    refused = 0
    inside: dict[int, float] = {}
    origin = start if origin is None else origin
    for want in wanted:
        position = origin + (want.position - origin) // grid * grid
        if start < position < limit:
            missing = 1 - settings.chance(want.reason)
            inside[position] = inside.get(position, 1.0) * missing
    for position in sorted(inside):
        if (1 - inside[position]) * (position - start) > settings.pass_tokens:
            return position, refused
        refused += 1
    return limit, refused


def plan_chunks(
    prefix_len: int,
    prompt_len: int,
    chunk_tokens: int,
    wanted: Sequence[Wanted],
    settings: PlacementSettings,
    page_size: int = 1,
) -> Plan:
    """Cut a whole prefill.

    Args:
        prefix_len: tokens reused. prompt_len: tokens of the prompt.
        chunk_tokens: most tokens of one chunk.

    Raises:
        ValueError: nothing to compute, or chunks shorter than a page.
    """
    if not 0 <= prefix_len < prompt_len or chunk_tokens < page_size:
        raise ValueError(
            f"cannot cut a prefill of tokens {prefix_len} to {prompt_len} into chunks of {chunk_tokens} tokens, "
            f"pages of {page_size}: the prompt must be longer than its prefix and a chunk at least one page"
        )
    ends: list[int] = []
    refused = 0
    start = prefix_len
    while start < prompt_len:
        limit = (start + chunk_tokens) // page_size * page_size
        end, dear = next_end(start, min(limit, prompt_len), wanted, settings, page_size)
        refused += dear
        ends.append(end)
        start = end
    return Plan(tuple(ends), refused)
