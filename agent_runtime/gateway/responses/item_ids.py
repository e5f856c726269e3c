"""Ids of responses and their items: all of one response are made from one random text, so items name their turn."""

import re
from typing import Literal

Kind = Literal["rs", "msg", "fc"]

RESPONSE_PREFIX = "resp_"
_OWN = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})[0-9a-f]{4}")


def response_id(token: str) -> str:
    """Id of the response with this random text, 32 hexadecimal digits."""
    return f"{RESPONSE_PREFIX}{token}"


def item_id(kind: Kind, token: str, index: int) -> str:
    """Id of a response's output item."""
    return f"{kind}_{token}{index:04x}"


def turn_of(item: object) -> str | None:
    """The random text in an item's id, None when the id was not made here."""
    found = _OWN.fullmatch(item) if isinstance(item, str) else None
    return found.group(1) if found is not None else None
