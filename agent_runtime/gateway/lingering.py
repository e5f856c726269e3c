"""A connection that is closed while its client still sends, so that the client can read why."""

import asyncio
from collections.abc import Callable

LINGER_S = 5.0
"""How long a client may go on sending after its answer, before the connection is cut."""
LINGER_BYTES = 64 * 1024 * 1024
"""How much of that is read and thrown away."""


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` waits for the client to stop when something it sends is unread.

    A socket that is closed with bytes unread sends a reset, which makes the client's system throw away the answer it
    has not read yet (RFC 9112, section 9.6). So only the writing side is closed at first; what comes in is thrown
    away until the client closes too, within the bounds above. ``sending`` says whether the client has more to send.
    """

    def __init__(self, inner: asyncio.Transport, sending: Callable[[], bool]) -> None:
        super().__init__()
        self._inner = inner
        self._sending = sending
        self._discarded_bytes = 0
        self._end: asyncio.TimerHandle | None = None

    @property
    def lingering(self) -> bool:
        """Whether the answer is out and what comes in goes to `discard`."""
        return self._end is not None

    def close(self) -> None:
        """The first time perhaps with a wait; the second time at once."""
        if self.lingering or self._inner.is_closing() or not self._sending():
            self.end()
            return
        self._end = asyncio.get_running_loop().call_later(LINGER_S, self.end)
        try:
            if self._inner.can_write_eof():
                self._inner.write_eof()
            self._inner.resume_reading()
        except OSError:  # the client has reset the connection, and the loop has not seen it yet
            self.end()

    def discard(self, data: bytes) -> None:
        """Bytes that nobody reads any more."""
        self._discarded_bytes += len(data)
        if self._discarded_bytes > LINGER_BYTES:
            self.end()

    def end(self) -> None:
        """Close, whoever still sends. The timer is kept: it says that this has lingered."""
        if self._end is not None:
            self._end.cancel()
        self._inner.close()

    def is_closing(self) -> bool:
        return self.lingering or self._inner.is_closing()

    def abort(self) -> None:
        self._inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.lingering:  # the writing side is closed
            self._inner.write(data)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def is_reading(self) -> bool:
        return self._inner.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._inner.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._inner.get_protocol()
