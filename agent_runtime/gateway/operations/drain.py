"""The orderly end of a gateway: not ready any more at once, no new work, and running work may end."""

import asyncio
import time

from agent_runtime.gateway.errors import RETRY_AFTER_S, ApiError


class Drain:
    """Whether the gateway is ending, and what still runs. Lives on the event loop; `begin` may be a signal handler."""

    def __init__(self) -> None:
        self.working = 0
        """Requests for work, and completions in the background."""
        self._began_s: float | None = None
        self._begun = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the gateway takes no more work."""
        return self._began_s is not None

    def begin(self) -> None:
        """Take no more work from now on."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._begun.set()  # a loop that sleeps sees it with its next turn: a server's has ten a second

    async def until_begun(self) -> None:
        """Wait for the end to begin."""
        await self._begun.wait()

    def for_s(self) -> float:
        """Seconds since the end began; 0 before."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def refusal(self) -> ApiError:
        """What new work is answered with."""
        return ApiError(
            503,
            "This gateway is draining: it ends as soon as its running requests have. Send the request again; another "
            "replica, or this one once it is started anew, will take it.",
            code="draining",
            type="server_error",
            headers={"retry-after": str(RETRY_AFTER_S), "connection": "close"},
        )
