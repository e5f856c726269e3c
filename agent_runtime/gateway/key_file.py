"""A file of API keys that may change while the gateway runs: keys are replaced and withdrawn without a restart."""

import logging
from pathlib import Path

import anyio

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.keys import ApiKeys, owners_in

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two looks at the file."""


class KeyFile:
    """Lets keys follow their file.

    Who may ask is settled at the start, for what is kept in memory is shared out among the owners then. So a name that
    is new in the file is not let in before a restart; keys of the names there were may come and go.
    """

    def __init__(self, path: Path, keys: ApiKeys) -> None:
        self._path, self._keys = path, keys
        self._seen: tuple[int, ...] | None = None  # the file may have changed since it was read at the start

    async def keep_reading(self) -> None:
        """Look at the file from time to time, until cancelled."""
        while True:
            await anyio.sleep(CHECK_S)
            self.look()

    def look(self) -> None:
        """Take over the file's keys if it is another file than at the last look.

        One that cannot be read, or has a line that is none, changes nothing: a slip must not lock everybody out.
        """
        try:
            stat = self._path.stat()
            state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        except OSError:
            state = ()
        if state == self._seen:
            return
        self._seen = state
        try:
            owners = owners_in(self._path)
        except SettingsError as error:
            logger.error("the keys stay as they are: %s", error)
            return
        self._take(owners)

    def _take(self, owners: dict[str, str]) -> None:
        known = {key: owner for key, owner in owners.items() if owner in self._keys.all_owners}
        for owner in sorted(set(owners.values()) - self._keys.all_owners):
            logger.warning("%s is new in api_keys_file %s: restart the gateway to let it in", owner, self._path)
        if self._keys.holds(known):
            return
        gone = sorted(self._keys.owners - set(known.values()))
        self._keys.replace(known)
        without = f"; without a key now: {', '.join(gone)}" if gone else ""
        logger.info("api_keys_file %s was read again: %d keys%s", self._path, len(known), without)
