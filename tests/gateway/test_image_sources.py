"""Files and URLs as images: only what the settings allow is ever opened, whatever a path or a redirect tries."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.image_files import ImageFolders
from agent_runtime.gateway.image_hosts import ImageHosts, is_public
from agent_runtime.gateway.images import ImageInput
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.vision.images import ImageError
from tests.gateway.pictures import give_sight, picture
from tests.gateway.serving import serving

LIMIT = 10_000
PNG = picture()


class TestFiles:
    """One allowed folder with things in it that are not for everybody."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "allowed"
        (folder / "deep er").mkdir(parents=True)
        for path in (folder / "a.png", folder / "deep er" / "ä#.png", tmp_path / "secret.png"):
            path.write_bytes(PNG)
        (folder / "large.png").write_bytes(bytes(LIMIT + 1))
        (folder / "link.png").symlink_to(tmp_path / "secret.png")
        (folder / "inside.png").symlink_to(folder / "a.png")
        (folder / "up").symlink_to(tmp_path)
        os.mkfifo(folder / "pipe")
        (tmp_path / "allowed-too").mkdir()
        (tmp_path / "allowed-too" / "b.png").write_bytes(PNG)
        return folder

    @pytest.mark.parametrize("name", ["a.png", "deep%20er/%C3%A4%23.png", ".//./a.png"])
    def test_a_file_below_the_folder_is_read(self, folder: Path, name: str) -> None:
        folders = ImageFolders([folder])
        assert folders.read(f"file://{folder}/{name}", LIMIT) == PNG
        assert folders.read(f"file://localhost{folder}/{name}", LIMIT) == PNG

    def test_a_folder_may_be_named_through_a_link_in_settings_and_in_requests(
        self, folder: Path, tmp_path: Path
    ) -> None:
        other_name = tmp_path / "other-name"
        other_name.symlink_to(folder)
        folders = ImageFolders([other_name])
        for spelled in (other_name, folder):
            assert folders.read(f"file://{spelled}/a.png", LIMIT) == PNG

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("../secret.png", "image_source_unsupported"),
            ("%2e%2e/secret.png", "image_source_unsupported"),
            ("up/../a.png", "image_source_unsupported"),
            ("../allowed-too/b.png", "image_source_unsupported"),
            ("a.png?b", "image_source_unsupported"),
            ("a.png%00", "image_source_unsupported"),
            ("%ff.png", "image_source_unsupported"),
            ("", "image_source_unsupported"),
            ("link.png", "image_not_readable"),
            ("inside.png", "image_not_readable"),
            ("up/secret.png", "image_not_readable"),
            ("a.png/b", "image_not_readable"),
            ("missing.png", "image_not_readable"),
            ("deep%20er", "image_not_readable"),
            ("pipe", "image_not_readable"),
            ("x" * 300, "image_not_readable"),
            ("large.png", "image_too_many_bytes"),
        ],
    )
    def test_everything_else_is_refused(self, folder: Path, name: str, code: str) -> None:
        with pytest.raises(ImageError) as refused:
            ImageFolders([folder]).read(f"file://{folder}/{name}", LIMIT)
        assert refused.value.code == code

    def test_a_folder_beside_the_allowed_one_is_not_allowed(self, folder: Path) -> None:
        for url in (f"file://{folder}-too/b.png", f"file://elsewhere{folder}/a.png", "file:a.png", "file://[/a.png"):
            with pytest.raises(ImageError) as refused:
                ImageFolders([folder]).read(url, LIMIT)
            assert refused.value.code == "image_source_unsupported"

    @pytest.mark.parametrize("wrong", ["allowed/a.png", "nowhere"])
    def test_a_setting_that_is_no_folder_ends_the_start(self, folder: Path, wrong: str) -> None:
        for path in (folder.parent / wrong, Path("allowed")):
            with pytest.raises(SettingsError, match="allow_image_files"):
                ImageFolders([path])


class PictureServer:
    """A host with pictures, and with all that may be wrong with one."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.cookies: list[str] = []
        self.silent = asyncio.Event()
        """Set when somebody waits for the answer that never comes."""

    def app(self) -> Starlette:
        """The server."""
        answers: dict[str, Callable[[Request], Response]] = {
            "/a.png": lambda _: Response(PNG, headers={"set-cookie": "seen=1"}),
            "/large.png": lambda _: Response(bytes(LIMIT + 1)),
            "/packed.png": lambda _: Response(PNG, headers={"content-encoding": "gzip"}),
            "/broken": lambda _: Response(status_code=500),
            "/near": lambda _: RedirectResponse("/a.png", 302),
            "/circle": lambda _: RedirectResponse("/circle", 307),
            "/away": lambda request: RedirectResponse(request.query_params["to"], 302),
        }

        async def answer(request: Request) -> Response:
            self.hosts.append(request.headers["host"])
            self.cookies.append(request.headers.get("cookie", ""))
            if request.url.path == "/silent":
                self.silent.set()
                await asyncio.Event().wait()
            known = answers.get(request.url.path)
            return known(request) if known else Response(status_code=404)

        return Starlette(routes=[Route("/{path:path}", answer)])


@pytest.fixture
def pictures() -> PictureServer:
    return PictureServer()


@pytest.fixture
async def site(pictures: PictureServer) -> AsyncGenerator[str, None]:
    """``127.0.0.1:port`` of the picture server."""
    async with serving(pictures.app()) as url:
        yield url.removeprefix("http://")


async def fetched(url: str, *allowed: str) -> bytes:
    """One fetch with an allow list of its own."""
    hosts = ImageHosts(allowed)
    try:
        return await hosts.read(url, LIMIT)
    finally:
        await hosts.aclose()


async def code_of(url: str, *allowed: str) -> str:
    """The code a fetch is refused with."""
    with pytest.raises(ImageError) as refused:
        await fetched(url, *allowed)
    return refused.value.code


class TestHosts:
    """A real server on loopback, which is a private address."""

    async def test_a_host_that_is_named_is_fetched_from_even_at_a_private_address(
        self, site: str, pictures: PictureServer
    ) -> None:
        port = site.partition(":")[2]
        assert await fetched(f"http://{site}/a.png", site) == PNG
        assert await fetched(f"http://LOCALHOST:{port}/a.png#fragment", f"localhost:{port}") == PNG
        assert await fetched(f"http://{site}/near", "unused.example", site) == PNG
        assert pictures.hosts == [site, f"localhost:{port}", site, site]

    async def test_no_cookie_is_kept_from_one_fetch_to_the_next(self, site: str, pictures: PictureServer) -> None:
        hosts = ImageHosts([site])
        for _ in range(2):
            assert await hosts.read(f"http://{site}/a.png", LIMIT) == PNG
        await hosts.aclose()
        assert pictures.cookies == ["", ""]

    async def test_a_pattern_does_not_lead_into_a_private_network(self, site: str, pictures: PictureServer) -> None:
        port = site.partition(":")[2]
        for url in (f"http://{site}/a.png", f"http://localhost:{port}/a.png", f"http://127.1:{port}/a.png"):
            assert await code_of(url, f"*:{port}") == "image_source_unsupported"
        assert pictures.hosts == []

    async def test_only_the_allowed_host_and_port_is_asked(self, site: str, pictures: PictureServer) -> None:
        for allowed in ((), ("127.0.0.1",), ("127.0.0.2:80",), ("*.0.0.1:1",), ("example.org", "*")):
            assert await code_of(f"http://{site}/a.png", *allowed) == "image_source_unsupported"
        assert await code_of(f"http://user@{site}/a.png", site) == "image_source_unsupported"
        assert await code_of("http://[/", site) == "image_source_unsupported"
        assert pictures.hosts == []

    async def test_a_redirect_is_checked_like_the_first_url(self, site: str, pictures: PictureServer) -> None:
        port = site.partition(":")[2]
        away = f"http://{site}/away?to=http://localhost:{port}/a.png"
        assert await code_of(away, site) == "image_source_unsupported"
        assert pictures.hosts == [site]
        assert await fetched(away, site, f"localhost:{port}") == PNG
        assert await code_of(f"http://{site}/away?to=file:///etc/hostname", site) == "image_source_unsupported"

    @pytest.mark.parametrize(
        ("path", "code"),
        [
            ("/missing.png", "image_not_readable"),
            ("/broken", "image_not_readable"),
            ("/circle", "image_not_readable"),
            ("/packed.png", "image_not_readable"),
            ("/large.png", "image_too_many_bytes"),
        ],
    )
    async def test_a_failed_fetch_has_its_reason(self, site: str, path: str, code: str) -> None:
        assert await code_of(f"http://{site}{path}", site) == code

    async def test_a_host_that_does_not_answer_or_exist_is_no_failure_of_the_server(self, site: str) -> None:
        assert await code_of("http://127.0.0.1:9/a.png", "127.0.0.1:9") == "image_not_readable"
        assert await code_of(f"http://{'a' * 70}.example/a.png", "*") == "image_not_readable"
        assert await code_of("http://nowhere.invalid/a.png", "*.invalid") == "image_not_readable"

    async def test_a_silent_host_costs_the_request_its_time_and_no_more(
        self, site: str, pictures: PictureServer, tmp_path: Path
    ) -> None:
        give_sight(tmp_path)
        settings = {"model": "m", "tokenizer_dir": tmp_path, "context_len": 9, "image_fetch_timeout_s": 0.2}
        images = ImageInput(GatewaySettings.model_validate({**settings, "allow_image_hosts": [site]}))
        with pytest.raises(ChatRequestError, match=r"was not there after 0\.2 s") as refused, anyio.fail_after(20):
            await images.fetch([("first", f"http://{site}/a.png"), ("second", f"http://{site}/silent")])
        assert (refused.value.param, refused.value.code) == ("second", "image_not_readable")
        assert pictures.silent.is_set()
        await images.aclose()

    async def test_all_fetched_images_together_are_limited(self, site: str, tmp_path: Path) -> None:
        give_sight(tmp_path)
        settings = {"model": "m", "tokenizer_dir": tmp_path, "context_len": 9, "max_body_bytes": len(PNG)}
        images = ImageInput(GatewaySettings.model_validate({**settings, "allow_image_hosts": [site]}))
        twice = [("first", f"http://{site}/a.png"), ("again", f"http://{site}/a.png")]
        assert await images.fetch(twice) == {f"http://{site}/a.png": PNG}, "one source is read once"
        with pytest.raises(ChatRequestError) as refused:
            await images.fetch([*twice, ("third", f"http://{site}/near")])
        assert refused.value.code == "image_too_many_bytes"
        await images.aclose()


@pytest.mark.parametrize("entry", ["", "http://example.org", "a/b", "*.*.org", "a*", "host:0", "host:99999", "::1"])
def test_an_entry_that_is_no_host_ends_the_start(entry: str) -> None:
    with pytest.raises(SettingsError, match="allow_image_hosts"):
        ImageHosts([entry])


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b:1::a00:1", False),
        ("fec0::1", False),
        ("::7f00:1", False),
        ("::ffff:0:7f00:1", False),
    ],
)
def test_an_address_is_public_only_when_the_internet_leads_to_it(address: str, public: bool) -> None:
    assert is_public(address) is public
