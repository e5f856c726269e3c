"""Registering commands for the schedulers; what they do in a running engine is tested with one."""

from __future__ import annotations

import pytest

from k3_sglang.cache import inspection  # noqa: F401  # registers commands
from k3_sglang.cache.remote import COMMANDS, command


def test_a_name_belongs_to_one_command() -> None:
    with pytest.raises(ValueError, match="a cache command 'dump' already"):
        command("dump")(lambda states, body: {})


def test_commands_that_only_look_are_not_posted() -> None:
    assert {name for name in ("dump", "metrics", "check") if COMMANDS[name].changes} == set()
