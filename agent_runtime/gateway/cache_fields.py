"""What a client may say about the cache: the `k3.cache` object of a request, and the name of its session."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field

from agent_runtime.gateway.owner import NO_OWNER

SESSION_HEADER = "x-k3-session"
OTHER_SESSION_HEADER = "x-session-id"
METADATA_KEY = "session_id"
MAX_NAME_CHARS = 512

SECONDS_OF_A_DAY = 86_400
MAX_FORK = 100_000

_PLAIN_NAME_CHARS = 128
_DIGEST_BYTES = 16

Source = Literal["session", "x-session-id", "prompt_cache_key", "metadata", "user"]
SOURCES: tuple[str, ...] = get_args(Source)

SessionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Seconds = Annotated[float, Field(ge=0, le=SECONDS_OF_A_DAY)]


class CacheFields(BaseModel):
    """``k3.cache`` of a request: what the caller knows about the requests that follow."""

    model_config = ConfigDict(extra="forbid", strict=True)

    session: SessionName | None = None
    """Name of the session; wins over every other."""
    wait_s: Seconds | None = None
    """Seconds until the session is expected back."""
    release: bool | None = None
    """Nothing of this session will be asked again after this request."""
    fork: Annotated[int, Field(ge=0, le=MAX_FORK)] | None = None
    """So many further requests with this head (tools and system messages) will follow soon."""
    pin_s: Seconds | None = None
    """Keep the head for so many seconds."""


class ExtensionFields(BaseModel):
    """``k3`` of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    cache: CacheFields | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A client's name for a conversation, and where it stood: equal names of two sources are two sessions.

    So are equal names of two owners; only the engine sees both, and there the owner is part of the name.
    """

    source: Source
    name: str
    owner: str = NO_OWNER

    @property
    def id(self) -> str:
        """How answers and the control routes name it."""
        return f"{self.source}:{self.name}"

    @property
    def engine_name(self) -> str:
        """How the engine and its dumps name it."""
        return f"{self.owner}/{self.record_name}" if self.owner else self.record_name

    @property
    def record_name(self) -> str:
        """How the record of its owner names it: long names and those of persons as a digest."""
        if self.is_conversation and len(self.name) <= _PLAIN_NAME_CHARS:
            return self.id
        digest = hashlib.blake2b(self.name.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{self.source}#{digest}"

    @property
    def is_conversation(self) -> bool:
        """Whether it is one conversation; a person has many, so `user` names no single one."""
        return self.source != "user"

    @classmethod
    def from_id(cls, text: str, owner: str = NO_OWNER) -> "Session":
        """An owner's session of an ``id``. Raises ValueError with what is allowed."""
        source, colon, name = text.partition(":")
        if not colon or source not in SOURCES or not 0 < len(name) <= MAX_NAME_CHARS:
            raise ValueError(
                f"a session is named as in k3.cache.session of answers: one of {', '.join(SOURCES)}, a colon, and a "
                f"name of 1 to {MAX_NAME_CHARS} characters"
            )
        return cls(source, name, owner)  # type: ignore[arg-type]  # it is in SOURCES


def find_session(
    headers: Mapping[str, str],
    fields: CacheFields | None,
    prompt_cache_key: str | None,
    metadata: Mapping[str, str] | None,
    user: str | None,
    owner: str = NO_OWNER,
) -> Session | None:
    """The request's session by the first name that is given; the order is that of the arguments and of `Source`.

    `SESSION_HEADER` is percent-encoded, as it is in answers. An empty name is none. Of names that are too long to be
    stored the first `MAX_NAME_CHARS` characters count.
    """
    named: tuple[tuple[Source, str | None], ...] = (
        ("session", fields.session if fields is not None else None),
        ("session", unquote(headers.get(SESSION_HEADER, ""))),
        ("x-session-id", headers.get(OTHER_SESSION_HEADER)),
        ("prompt_cache_key", prompt_cache_key),
        ("metadata", (metadata or {}).get(METADATA_KEY)),
        ("user", user),
    )
    return next((Session(source, name[:MAX_NAME_CHARS], owner) for source, name in named if name), None)
