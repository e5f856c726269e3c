"""Whether the engine has the checkpoint cache: asked once it answers, so that hints and control go only there."""

import logging
from typing import Any

import anyio

from agent_runtime.engine.types import Engine
from agent_runtime.errors import EngineError

logger = logging.getLogger(__name__)

BACKEND = "k3"
"""The engine's name for the checkpoint cache, in its ``radix_cache_backend``."""

FIRST_TRY_S = 5.0
"""How long the start of the gateway waits for the answer."""
RETRY_S = 5.0


class CacheLink:
    """Knows whether the engine's cache is ours. Unknown counts as no: hints change the speed only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._active: bool | None = None

    @property
    def active(self) -> bool:
        """Whether the engine is known to run the checkpoint cache."""
        return bool(self._active)

    async def counters(self) -> list[dict[str, Any]]:
        """The cache's counters, one entry for each of the engine's queues. Raises EngineError."""
        return await self._engine.cache_command("metrics")

    async def ask(self) -> bool:
        """Ask the engine. Returns whether it answered."""
        try:
            info = await self._engine.server_info()
        except EngineError as error:
            logger.debug("the engine does not say yet which cache it runs: %s", error)
            return False
        self._active = info.get("radix_cache_backend") == BACKEND
        if not self._active:
            logger.info("the engine's cache is %r, not %r: no hints are sent", info.get("radix_cache_backend"), BACKEND)
        return True

    async def first_ask(self) -> None:
        """The question at the start, bounded in time."""
        with anyio.move_on_after(FIRST_TRY_S):
            await self.ask()

    async def keep_asking(self) -> None:
        """Ask until the engine has answered; it may start after the gateway."""
        while self._active is None and not await self.ask():
            await anyio.sleep(RETRY_S)
