"""Stands in the engine's place before another server: tells whether that one answers, and takes no ids."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NoReturn

from agent_runtime.engine.types import Chunk, EngineImage, Generation, SamplingParams
from agent_runtime.errors import EngineRejected
from agent_runtime.upstream.client import UpstreamClient


class ForeignEngine:
    """An `Engine` whose work is done by `ForeignServer`; it owns the connections."""

    def __init__(self, client: UpstreamClient, model: str) -> None:
        self._client = client
        self._model = model

    async def stream(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """Raises EngineRejected."""
        _refuse(rid)
        yield  # the protocol wants a generator

    async def generate(
        self, ids: Sequence[int], sampling: SamplingParams, rid: str, images: Sequence[EngineImage] = ()
    ) -> Generation:
        """Raises EngineRejected."""
        _refuse(rid)

    async def abort(self, rid: str) -> None:
        """Nothing runs here: closing its stream ends a request."""

    async def healthy(self, *, deep: bool = False) -> bool:
        """Whether the server lists its models; ``deep`` makes it generate a token."""
        return await self._client.healthy(model=self._model if deep else None)

    async def server_info(self) -> dict[str, Any]:
        """Nothing: no cache of ours is there to be told anything."""
        return {}

    async def cache_command(self, name: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Raises EngineRejected."""
        _refuse(None)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _refuse(rid: str | None) -> NoReturn:
    raise EngineRejected("this gateway stands before another server, which takes messages and no ids", rid)
