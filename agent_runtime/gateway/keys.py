"""The API keys of a gateway: read from a file or a variable, kept as digests, each with its owner."""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.settings import GatewaySettings

MIN_KEY_CHARS = 16
"""A shorter key could be found by trying."""
MAX_KEY_CHARS = 512

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(rf"[A-Za-z0-9._~+/=-]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
_OWNER_DIGITS = 12


class ApiKeys:
    """Keys and whose they are. Several keys may be one owner's, so that a key can be replaced without a break."""

    def __init__(self, owners: Mapping[str, str]) -> None:
        """``owners`` by key; it must not be empty, for then nobody could be let in."""
        if not owners:
            raise ValueError("there must be at least one key")
        self._salt = secrets.token_bytes(32)
        self._owners = self._digests(owners)
        self.all_owners: Final = self.owners
        """Everybody who had a key at the start."""

    @property
    def owners(self) -> frozenset[str]:
        """Everybody who has a key."""
        return frozenset(owner for _, owner in self._owners)

    def holds(self, owners: Mapping[str, str]) -> bool:
        """Whether the keys are these and no others."""
        return set(self._owners) == set(self._digests(owners))

    def replace(self, owners: Mapping[str, str]) -> None:
        """Let these keys be all. With none nobody is let in.

        Raises ValueError for an owner who had no key at the start.
        """
        if strangers := set(owners.values()) - self.all_owners:
            raise ValueError(
                f"{sorted(strangers)} had no key at the start; only {sorted(self.all_owners)} may have one"
            )
        self._owners = self._digests(owners)

    def owner(self, key: str) -> str | None:
        """Whose key this is. It is compared with every one, whole, so that the time taken tells nothing of any."""
        asked = self._digest(key)
        found: str | None = None
        for known, owner in self._owners:
            if hmac.compare_digest(known, asked):
                found = owner
        return found

    def _digests(self, owners: Mapping[str, str]) -> tuple[tuple[bytes, str], ...]:
        return tuple((self._digest(key), owner) for key, owner in owners.items())

    def _digest(self, key: str) -> bytes:
        return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=self._salt, digest_size=32).digest()


def read_keys(settings: GatewaySettings) -> ApiKeys | None:
    """The keys that the settings name, None when they name none.

    Raises SettingsError with the line at fault and what is allowed; never with what the line says.
    """
    if settings.api_keys_file is not None:
        return ApiKeys(owners_in(settings.api_keys_file))
    if settings.api_keys_env is not None:
        text = os.environ.get(settings.api_keys_env)
        if text is None:
            raise SettingsError(f"api_keys_env names the variable {settings.api_keys_env}, which is not set")
        return ApiKeys(_parsed(text.replace(",", "\n"), f"variable {settings.api_keys_env} of api_keys_env"))
    return None


def owners_in(path: Path) -> dict[str, str]:
    """Owners by key, of a file. Raises SettingsError as :func:`read_keys`."""
    return _parsed(_file_text(path), f"api_keys_file {path}")


def readable_by_others(path: Path) -> bool:
    """Whether others than its owner and group may read a file."""
    return bool(path.stat().st_mode & 0o004)


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read api_keys_file {path}: {error.strerror}") from error
    except ValueError as error:  # its words would quote the file
        raise SettingsError(f"api_keys_file {path} is not text in UTF-8") from error


def _parsed(text: str, where: str) -> dict[str, str]:
    """Owners by key."""
    owners: dict[str, str] = {}
    for number, name, key in _entries(text):
        if name is not None and not _NAME.fullmatch(name):
            raise SettingsError(
                f"{where}, line {number}: the name before the colon has {len(name)} characters; a name is 1 to 64 "
                "letters, digits or . _ -, the first a letter or digit"
            )
        if not _KEY.fullmatch(key):
            raise SettingsError(
                f"{where}, line {number}: the key has {len(key)} characters; a key is {MIN_KEY_CHARS} to "
                f"{MAX_KEY_CHARS} letters, digits or . _ ~ + / = -, alone on its line or behind `name:`"
            )
        if key in owners:
            raise SettingsError(f"{where}, line {number}: this key was there before; each line has a key of its own")
        owners[key] = name if name is not None else _owner_name(key)
    if not owners:
        raise SettingsError(f"{where} has no key; write one a line, `name:key` or `key`")
    return owners


def _entries(text: str) -> Iterator[tuple[int, str | None, str]]:
    """Number, name and key of every line that has one; ``#`` begins a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if entry:
            name, colon, key = entry.partition(":")
            yield (number, name.strip(), key.strip()) if colon else (number, None, entry)


def _owner_name(key: str) -> str:
    """A name for the owner of a key without one: the same after a restart, and no way back to the key."""
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:_OWNER_DIGITS]}"
