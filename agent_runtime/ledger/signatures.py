"""Signatures of turns: opaque text that goes out with a turn's thinking and, sent back, leads to the turn."""

import secrets

_RANDOM_BYTES = 24
_PREFIX = "k3."


def new_signature() -> str:
    """A new signature. It says nothing about its turn and nobody can guess one, so none can be forged.

    Random rather than computed: one whose turn was never recorded leads nowhere, also after a restart.
    """
    return f"{_PREFIX}{secrets.token_urlsafe(_RANDOM_BYTES)}"


def is_own_signature(text: str) -> bool:
    """Whether a signature looks as if it was made here; other servers' say nothing here."""
    return text.startswith(_PREFIX)
