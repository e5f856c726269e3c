"""What the gateway and an engine client say to each other: ids, sampling parameters, chunks, finish."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# SGLang's `sampling_params` object; its keys are SGLang's, so it is passed on as it is.
SamplingParams = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineImage:
    """A picture for one ``<|media_pad|>`` id of a prompt, which the engine replaces by ``tokens`` positions."""

    data_url: str
    tokens: int


def expanded_len(ids: Sequence[int], images: Sequence[EngineImage]) -> int:
    """Prompt tokens as the engine counts them: each image's one id has become its positions."""
    return len(ids) + sum(image.tokens - 1 for image in images)


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended. ``matched`` is the stop token id (or string) when one ended it."""

    type: Literal["stop", "length"]
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output ids since the chunk before, with the totals known so far.

    ``ids`` may be empty (a chunk that only carries the end). ``completion_tokens`` counts every id of
    this generation so far. ``finish`` is set on the last chunk and only there. ``cache`` is what the engine's
    cache says about ``cached_tokens``, empty when it says nothing.
    """

    ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: Finish | None = None
    cache: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Generation:
    """One whole generation: every output id in order, and the final counts."""

    ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    finish: Finish


class Engine(Protocol):
    """A token-exact engine: prompt ids in, output ids out. ``images`` belong to the prompt's pads, in order.

    Whoever stops iterating ``stream`` early closes it (``contextlib.aclosing``); closing an unfinished
    stream aborts the request in the engine.
    """

    def stream(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """Generate; yields chunks, the last one has ``finish``. Raises a subclass of EngineError."""
        ...

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage] = ()
    ) -> Generation:
        """Generate and wait for the whole output. Cancelling the call aborts the request."""
        ...

    async def abort(self, rid: str) -> None:
        """Ask the engine to drop a request; a rid it does not know is not an error."""
        ...

    async def healthy(self, *, deep: bool = False) -> bool:
        """Whether the engine answers; ``deep`` makes it generate a token to prove it."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """The engine's own description of itself."""
        ...

    async def cache_command(self, name: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Show or steer the engine's cache; one answer per rank. EngineRejected when it cannot be done as asked."""
        ...

    async def aclose(self) -> None:
        """Finish pending aborts and close connections."""
        ...
