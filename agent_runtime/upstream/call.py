"""A call of another server's turn while its pieces arrive; no I/O."""

from dataclasses import dataclass, field

from agent_runtime.upstream.pieces import WholeCharacters
from k3_sglang.chat.arguments import load_arguments
from k3_sglang.chat.errors import ChatRequestError


@dataclass(slots=True)
class Call:
    """One call: ``own_id`` is the gateway's for it, ``id`` the server's."""

    own_id: str
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])
    characters: WholeCharacters = field(default_factory=WholeCharacters)
    place: int | None = None
    """Its index for the client, once told."""
    said: int = 0
    """Pieces of the arguments that the client has."""
    ended: bool = False
    looked_at: int = -1
    """Pieces of the arguments when it was last looked whether they are complete."""

    def unsaid(self) -> str:
        """The arguments since the last call of this."""
        text = "".join(self.arguments[self.said :])
        self.said = len(self.arguments)
        return text

    def text(self) -> str:
        """All arguments. Some servers write ``null`` for a call without any, which is no object."""
        text = "".join(self.arguments)
        return "{}" if text.strip() == "null" else text

    def is_over(self) -> bool:
        """Whether its arguments are there and complete."""
        if len(self.arguments) == self.looked_at:
            return False
        self.looked_at = len(self.arguments)
        text = self.text()
        return bool(text.strip()) and is_complete(text)


def is_complete(arguments: str) -> bool:
    """Whether arguments are a whole JSON object; blank ones are an empty one."""
    try:
        return load_arguments(arguments) is not None
    except ChatRequestError:
        return False
