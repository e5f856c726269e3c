"""A file of keys that changes while the gateway runs: replaced, withdrawn, broken, gone."""

import logging
from pathlib import Path

import anyio
import httpx
import pytest

from agent_runtime.gateway.key_file import KeyFile
from agent_runtime.gateway.keys import ApiKeys, owners_in
from tests.gateway.process import running, write

OLD, NEW, BOB, EVE = "ann-key-000000001", "ann-key-000000002", "bob-key-000000001", "eve-key-000000001"


class Kept:
    """A file, the keys that follow it, and a look at it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(f"ann:{OLD}\nbob:{BOB}\n")
        self.keys = ApiKeys(owners_in(path))
        self.follower = KeyFile(path, self.keys)

    def write(self, text: str) -> None:
        """Replace the file, as an editor does."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        new.replace(self.path)

    def change(self, text: str) -> None:
        """Replace the file and look."""
        self.write(text)
        self.follower.look()

    def owners(self, *keys: str) -> list[str | None]:
        """Whose these are."""
        return [self.keys.owner(key) for key in keys]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "keys")


def test_a_key_is_replaced_with_both_valid_in_between(kept: Kept) -> None:
    kept.change(f"ann:{OLD}\nann:{NEW}\nbob:{BOB}\n")
    assert kept.owners(OLD, NEW, BOB) == ["ann", "ann", "bob"]
    kept.change(f"ann:{NEW}\nbob:{BOB}\n")
    assert kept.owners(OLD, NEW, BOB) == [None, "ann", "bob"]


def test_an_owner_without_keys_is_let_in_again_when_the_file_has_one(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kept.change(f"ann:{OLD}\n")
    assert kept.owners(OLD, BOB) == ["ann", None]
    assert "1 keys; without a key now: bob" in caplog.text
    kept.change(f"bob:{BOB}\n")
    assert kept.owners(OLD, BOB) == [None, "bob"]


def test_a_new_name_waits_for_a_restart_and_the_log_says_so_without_the_key(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    kept.change(f"ann:{OLD}\nbob:{BOB}\neve:{EVE}\n")
    assert kept.owners(OLD, BOB, EVE) == ["ann", "bob", None]
    assert "eve is new" in caplog.text and "restart the gateway" in caplog.text and EVE not in caplog.text
    with pytest.raises(ValueError, match="eve.*had no key at the start"):
        kept.keys.replace({EVE: "eve"})


def test_a_key_that_is_given_to_a_new_name_is_taken_from_the_old_one(kept: Kept) -> None:
    kept.change(f"eve:{OLD}\nbob:{BOB}\n")
    assert kept.owners(OLD, BOB) == [None, "bob"]


@pytest.mark.parametrize("text", ["", "# nothing\n", "ann:short\n", f"ann:{NEW}\nbob\n", f"ann:{NEW}\nbob:{NEW}\n"])
def test_a_file_with_a_slip_changes_nothing_and_is_complained_of_once(
    kept: Kept, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept.change(text)
    kept.follower.look()
    assert kept.owners(OLD, NEW, BOB) == ["ann", None, "bob"]
    assert caplog.text.count("the keys stay as they are") == 1
    assert NEW not in caplog.text


def test_a_file_that_is_gone_changes_nothing_until_it_is_back(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.path.unlink()
    kept.follower.look()
    kept.follower.look()
    assert kept.owners(OLD, BOB) == ["ann", "bob"]
    assert caplog.text.count("cannot read api_keys_file") == 1
    kept.change(f"ann:{NEW}\n")
    assert kept.owners(OLD, NEW) == [None, "ann"]


def test_a_file_that_is_touched_but_not_changed_is_not_spoken_of(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kept.change(kept.path.read_text())
    assert caplog.text == ""


@pytest.mark.timeout(60)
async def test_a_running_gateway_takes_a_replaced_key_and_refuses_the_old_one(settings_file: Path) -> None:
    path = settings_file.parent / "keys"
    path.write_text(f"ann:{OLD}\n")
    async with (
        running(write(settings_file.parent, {"api_keys_file": str(path)})) as (_, url),
        httpx.AsyncClient(base_url=url, trust_env=False) as client,
    ):

        async def status(key: str) -> int:
            return (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

        assert (await status(OLD), await status(NEW)) == (200, 401)
        path.write_text(f"ann:{NEW}\n")
        while await status(NEW) == 401:
            await anyio.sleep(0.05)
        assert (await status(OLD), await status(NEW)) == (401, 200)
