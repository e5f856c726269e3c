"""What systemd is told: by a real datagram socket, of both kinds of address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from k3_sglang.launch.notify import READY, VARIABLE, tell_systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_the_state_arrives_as_one_datagram(tmp_path: Path, abstract: bool) -> None:
    name = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name if abstract else name)
        receiver.settimeout(5)
        assert tell_systemd(READY, {VARIABLE: "@" + name if abstract else name})
        assert receiver.recv(100) == b"READY=1"


def test_without_systemd_nobody_is_told(tmp_path: Path) -> None:
    assert not tell_systemd(READY, {})
    assert not tell_systemd(READY, {VARIABLE: f"{tmp_path}/gone"})
