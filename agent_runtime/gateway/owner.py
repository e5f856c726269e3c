"""Whose request it is: the owner of the key it came with."""

from starlette.requests import HTTPConnection

OWNER = "k3.owner"
"""Where the ASGI scope of a request that came with a key names its owner."""

NO_OWNER = ""
"""Whose requests are without keys: everybody's."""


def owner_of(connection: HTTPConnection) -> str:
    """Whose request this is; all are one owner's where there are no keys."""
    return connection.scope.get(OWNER, NO_OWNER)
