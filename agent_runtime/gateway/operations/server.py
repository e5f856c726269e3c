"""Serves an application until it is told to stop: drains first, while it still listens, then closes."""

import signal
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from agent_runtime.gateway.http import Http
from agent_runtime.gateway.operations.drain import Drain
from agent_runtime.gateway.settings import GatewaySettings


class DrainingServer(uvicorn.Server):
    """A server that goes on listening after the first signal, until nothing runs or its time is over.

    A balancer so reads "not ready" instead of finding nobody, and a client its protocol's answer. The second signal
    ends the wait: what runs is aborted, and everything is closed in order.
    """

    def __init__(self, app: ASGIApp, drain: Drain, settings: GatewaySettings) -> None:
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            http=Http,
            ws="none",
            h11_max_incomplete_event_size=settings.max_header_bytes,
            timeout_graceful_shutdown=settings.shutdown_grace_s,
        )
        super().__init__(config)
        self._drain = drain
        self._grace_s = settings.shutdown_grace_s
        self._notice_s = min(settings.drain_notice_s, settings.shutdown_grace_s)
        self._hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT."""
        self._captured_signals.append(sig)
        self._hurry = self._drain.begun
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to close."""
        if self._drain.begun and not self.should_exit:
            for_s = self._drain.for_s()
            idle = self._drain.working == 0 and for_s >= self._notice_s
            if idle or self._hurry or for_s >= self._grace_s:
                # What is left of the grace is for answers that are being written; nothing left means abort now.
                rest_s = 0.0 if self._hurry else max(0.0, self._grace_s - for_s)
                self.config.timeout_graceful_shutdown = rest_s  # type: ignore[assignment]  # it goes to `wait_for`
                self.should_exit = True
        return await super().on_tick(counter)


def serve(app: ASGIApp, drain: Drain, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then end the process with 0."""
    # uvicorn repeats the signal that stopped it once all is closed; this makes that an orderly exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    DrainingServer(app, drain, settings).run()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
