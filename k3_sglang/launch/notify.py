"""Tells systemd how a service is: one datagram to the socket it names; nothing without one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

VARIABLE = "NOTIFY_SOCKET"
READY = "READY=1"
STOPPING = "STOPPING=1"


def tell_systemd(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send ``state`` as sd_notify(3) does. Returns whether there was somebody to tell.

    A socket that cannot be reached is no reason to end a server: systemd then sees a start that never gets ready.
    """
    address = environment.get(VARIABLE, "")
    if not address:
        return False
    if address.startswith("@"):  # abstract: the name begins with a null byte
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), address)
        except OSError:
            return False
    return True
