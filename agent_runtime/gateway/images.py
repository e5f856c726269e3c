"""Image parts of requests: read where allowed, checked, measured, and turned into what the engine is given."""

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from threading import BoundedSemaphore, Lock
from typing import Any, NamedTuple, NoReturn

import anyio
import anyio.to_thread

from agent_runtime.errors import SettingsError
from agent_runtime.gateway.image_files import ImageFolders
from agent_runtime.gateway.image_hosts import ImageHosts
from agent_runtime.gateway.settings import GatewaySettings
from k3_sglang.chat.errors import ChatRequestError
from k3_sglang.chat.json_types import is_object
from k3_sglang.chat.request_fields import shown
from k3_sglang.chat.types import ImagePart
from k3_sglang.config import ConfigError
from k3_sglang.vision.config import PREPROCESSOR_FILE, MediaConfig
from k3_sglang.vision.geometry import image_tokens
from k3_sglang.vision.images import DEFAULT_LIMITS, ImageError, data_url_bytes, load_image

DECODED_TOGETHER = 2
"""Pictures decoded at one time; one at the limit takes 256 MB while it is."""
FETCHED_TOGETHER = 8
KNOWN_IMAGES = 10_000
"""Checked pictures remembered by their digest: a history brings the same ones again with every request."""

Fetched = Mapping[str, bytes]
"""Content of sources that had to be read, by source."""


class _Checked(NamedTuple):
    """A picture that has been decoded completely once."""

    width: int
    height: int
    kind: str
    """Format as a media type names it."""


class ImageInput:
    """What this gateway does with images; one for all requests. Thread-safe."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises SettingsError for allow lists or a preprocessor configuration that cannot be used."""
        self._settings = settings
        self.media, self.text_only_reason = _media_config(settings)
        self._folders = ImageFolders(settings.allow_image_files)
        self._hosts = ImageHosts(settings.allow_image_hosts)
        self._known: OrderedDict[bytes, _Checked] = OrderedDict()
        self._lock = Lock()
        self._decoding = BoundedSemaphore(DECODED_TOGETHER)

    async def aclose(self) -> None:
        """Close connections."""
        await self._hosts.aclose()

    async def fetch(self, sources: Iterable[tuple[str, str]]) -> Fetched:
        """Read files and URLs among (path of the part, source) pairs, as far as images are accepted at all.

        Raises ChatRequestError for the first source that may not or cannot be read, and when all together take
        more than ``image_fetch_timeout_s`` or ``max_body_bytes``.
        """
        named = list(sources)
        wanted: dict[str, str] = {}
        for param, source in named:
            if _scheme(source) in ("file", "http", "https"):
                wanted.setdefault(source, param)
        if self.media is None or not wanted or len(named) > self._settings.max_images:
            return {}  # what is wrong is said when the request is parsed
        results: dict[str, bytes | ImageError] = {}
        slots = anyio.CapacityLimiter(FETCHED_TOGETHER)

        async def read(source: str) -> None:
            async with slots:
                try:
                    self._check_total(results)
                    results[source] = await self._read(source)
                except ImageError as error:
                    results[source] = error

        with anyio.move_on_after(self._settings.image_fetch_timeout_s):
            async with anyio.create_task_group() as tasks:
                for source in wanted:
                    tasks.start_soon(read, source)
        return {source: self._result(source, results, param) for source, param in wanted.items()}

    def request_images(self, fetched: Fetched) -> "RequestImages":
        """The resolver for one request."""
        return RequestImages(self, self._settings, fetched)

    def checked(self, data: bytes) -> tuple[bytes, _Checked]:
        """Digest of a picture, and what it is. Raises ImageError when it is not accepted."""
        digest = hashlib.sha256(data).digest()
        with self._lock:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return digest, known
        with self._decoding:
            picture = load_image(data)
        checked = _Checked(*picture.size, (picture.format or "png").lower())
        with self._lock:
            self._known[digest] = checked
            if len(self._known) > KNOWN_IMAGES:
                self._known.popitem(last=False)
        return digest, checked

    async def _read(self, source: str) -> bytes:
        if _scheme(source) != "file":
            return await self._hosts.read(source, DEFAULT_LIMITS.max_bytes)
        read = partial(self._folders.read, source, DEFAULT_LIMITS.max_bytes)
        return await anyio.to_thread.run_sync(read, abandon_on_cancel=True)

    def _check_total(self, results: Mapping[str, bytes | ImageError]) -> None:
        limit = self._settings.max_body_bytes
        if sum(len(data) for data in results.values() if isinstance(data, bytes)) > limit:
            raise ImageError("image_too_many_bytes", f"the images to fetch have more than {limit} bytes; send fewer")

    def _result(self, source: str, results: Mapping[str, bytes | ImageError], param: str) -> bytes:
        try:
            self._check_total(results)
            result = results.get(source)
            if result is None:
                limit_s = self._settings.image_fetch_timeout_s
                raise ImageError("image_not_readable", f"{shown(source)} was not there after {limit_s:g} s")
            if isinstance(result, ImageError):
                raise result
        except ImageError as error:
            raise ChatRequestError(param, error.code, str(error)) from error
        return result


class RequestImages:
    """Finds the size of each image of one request, and keeps the request within the limits. Called in order."""

    def __init__(self, images: ImageInput, settings: GatewaySettings, fetched: Fetched) -> None:
        self._images = images
        self._settings = settings
        self._fetched = fetched
        self._count = 0
        self._tokens = 0
        self._bytes = 0

    def __call__(self, source: str, param: str) -> ImagePart:
        """The image at ``param``, with a data URL as its source. Raises ChatRequestError."""
        media = self._images.media
        if media is None:
            _refuse(param, "images_unsupported", f"this model takes text only: {self._images.text_only_reason}")
        self._count += 1
        if self._count > self._settings.max_images:
            _refuse(param, "too_many_images", f"a request may have {self._settings.max_images} images; send fewer")
        try:
            data = self._fetched.get(source)
            payload = None if data is not None else source[source.find(",") + 1 :]
            data = data_url_bytes(source) if data is None else data
            self._bytes += len(data)
            if self._bytes > self._settings.max_body_bytes:
                limit = self._settings.max_body_bytes
                raise ImageError(
                    "image_too_many_bytes", f"the images have more than {limit} bytes together; send fewer"
                )
            digest, checked = self._images.checked(data)
        except ImageError as error:
            raise ChatRequestError(param, error.code, str(error)) from error
        size = (checked.width, checked.height)
        tokens = image_tokens(*size, media)
        self._tokens += tokens
        if self._tokens > self._settings.max_image_tokens:
            _refuse(
                param,
                "too_many_image_tokens",
                f"an image of {size[0]}x{size[1]} pixels is {tokens} tokens, and with it the images of the request are "
                f"{self._tokens}; allowed: {self._settings.max_image_tokens}. Send smaller images or fewer",
            )
        payload = base64.b64encode(data).decode("ascii") if payload is None else payload
        # The type is what the content is, not what the source said.
        return ImagePart(f"data:image/{checked.kind};base64,{payload}", size, digest, tokens)


def _media_config(settings: GatewaySettings) -> tuple[MediaConfig | None, str]:
    """How the checkpoint wants images, or None and why it takes none. Raises SettingsError for files that are wrong."""
    folder = settings.tokenizer_dir
    if folder is None or not settings.images:
        return None, "the engine behind this server was started without images"
    try:
        config: Any = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        config = {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not is_object(config) or config.get("vision_config") is None:
        return None, "its checkpoint has no vision_config"
    if not (folder / PREPROCESSOR_FILE).is_file():
        return None, f"its checkpoint has no {PREPROCESSOR_FILE}"
    try:
        return MediaConfig.from_dir(folder), ""
    except ConfigError as error:
        raise SettingsError(str(error)) from error


def _scheme(source: str) -> str:
    return source[:8].partition(":")[0].lower()


def _refuse(param: str, code: str, message: str) -> NoReturn:
    raise ChatRequestError(param, code, message)
