"""Ids of tool calls as they are made here: nobody can guess or repeat one, so each leads to its turn."""

import re
import secrets

_RANDOM_BYTES = 12
_OWN = re.compile(rf"call_[0-9a-f]{{{2 * _RANDOM_BYTES}}}")


def new_call_id() -> str:
    """A new id. K3's prompt does not contain ids, so any text will do."""
    return f"call_{secrets.token_hex(_RANDOM_BYTES)}"


def is_own(call_id: str) -> bool:
    """Whether an id looks as if it was made here."""
    return _OWN.fullmatch(call_id) is not None
