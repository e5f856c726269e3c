"""Fetches http(s) images, from hosts that the settings allow and from nowhere else."""

import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import NamedTuple

import anyio
import httpx

from agent_runtime.errors import SettingsError
from k3_sglang.chat.request_fields import shown
from k3_sglang.vision.images import ImageError

MAX_REDIRECTS = 3
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_WEB_PORTS = {"http": 80, "https": 443}
_ENTRY = re.compile(r"(?P<any>\*\.)?(?P<host>\*|[a-z0-9_.-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?", re.IGNORECASE)
# Addresses that carry an IPv4 address inside; a gateway on the way would send the packets there.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class _Allowed(NamedTuple):
    """One entry of ``allow_image_hosts``. ``port`` None stands for the two ports of the web."""

    host: str
    """Lower case; "" for every host."""
    below: bool
    """Whether the hosts below ``host`` are meant, and not itself."""
    port: int | None

    def covers(self, host: str, port: int, scheme: str) -> bool:
        named = host.endswith(f".{self.host}") if self.below else self.host in ("", host)
        return named and port == (_WEB_PORTS[scheme] if self.port is None else self.port)

    @property
    def is_pattern(self) -> bool:
        """Whether nobody wrote down the host's own name: then it must not lead into a private network."""
        return self.below or not self.host


class ImageHosts:
    """The hosts that images may be fetched from.

    Entries are ``host``, ``host:port``, ``*.domain`` and ``*``. A host that only a pattern covers must have a public
    address. The address that was checked is the one connected to, and each redirect is checked like the first URL.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        """Raises SettingsError for an entry that is not understood."""
        self._allowed = [_entry(text) for text in allowed]
        self._client = _stateless_client() if self._allowed else None

    async def aclose(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.aclose()

    async def read(self, url: str, max_bytes: int) -> bytes:
        """What a URL gives, following redirects among allowed hosts.

        Raises:
            ImageError: a host that is not allowed (``image_source_unsupported``), a failed request
                (``image_not_readable``), or more than ``max_bytes``.
        """
        try:
            at = httpx.URL(url)
            for _ in range(MAX_REDIRECTS + 1):
                async with self._get(at, url) as response:
                    if response.status_code not in _REDIRECTS:
                        return await _content(response, url, max_bytes)
                    at = at.join(response.headers.get("location", ""))
        except httpx.InvalidURL as error:
            raise _not_allowed(url, f"no valid URL ({error})") from error
        except (httpx.HTTPError, OSError, UnicodeError) as error:  # UnicodeError: a name no resolver takes
            raise _unreadable(url, str(error) or type(error).__name__) from error
        raise _unreadable(url, f"more than {MAX_REDIRECTS} redirects")

    @asynccontextmanager
    async def _get(self, at: httpx.URL, url: str) -> AsyncGenerator[httpx.Response, None]:
        if at.userinfo:
            raise _not_allowed(url, "URLs with a user name are not fetched")
        if at.scheme not in _WEB_PORTS:
            raise _not_allowed(url, f"it leads to {shown(at.scheme)}, which is neither http nor https")
        host = at.raw_host.decode("ascii").rstrip(".").lower()
        port = at.port or _WEB_PORTS.get(at.scheme, 0)
        entries = [entry for entry in self._allowed if port and entry.covers(host, port, at.scheme)]
        if self._client is None or not entries:
            where = f"{at.scheme}://{host}:{port}" if port else f"{at.scheme}:"
            raise _not_allowed(url, f"{shown(where)} is not among the hosts this server fetches from")
        public_only = all(entry.is_pattern for entry in entries)
        address = await _address(host, port, url, public_only=public_only)
        headers = {"host": at.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
        # The certificate is checked for the host's name; the connection goes to the address that was checked.
        named = {"sni_hostname": host}
        request = self._client.build_request("GET", at.copy_with(host=address), headers=headers, extensions=named)
        response = await self._client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()


def _stateless_client() -> httpx.AsyncClient:
    """A client on which no fetch leaves anything for the next: no cookie, no connection.

    A connection kept open for an address could serve another host's name.
    """
    return httpx.AsyncClient(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        trust_env=False,
    )


async def _address(host: str, port: int, url: str, *, public_only: bool) -> str:
    """An address of a host, the first that may be used."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    usable = [address for address in addresses if not public_only or is_public(address)]
    if not usable:
        raise _not_allowed(url, "its host is in a private network and not itself named in allow_image_hosts")
    return usable[0]


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, and so does an IPv4 address that it carries."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        carried = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if carried is None and ip in _NAT64:
            carried = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if carried is not None:
            return is_public(str(carried))
        if ip not in _GLOBAL_UNICAST:  # also forms that carry an IPv4 address and are not routed
            return False
    return ip.is_global and not ip.is_multicast


async def _content(response: httpx.Response, url: str, max_bytes: int) -> bytes:
    if response.status_code != 200:
        raise _unreadable(url, f"the host answered status {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _unreadable(url, "the host compressed it, which it was asked not to do")
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > max_bytes:
            raise ImageError("image_too_many_bytes", f"{shown(url)} has more than the allowed {max_bytes} bytes")
    return bytes(data)


def _entry(text: str) -> _Allowed:
    match = _ENTRY.fullmatch(text)
    if match is None or (match["any"] and "*" in match["host"]) or not 0 < int(match["port"] or 1) < 2**16:
        raise SettingsError(
            f"allow_image_hosts names {text!r}; allowed: a host (IPv6 in brackets), host:port, *.domain, and * for any"
        )
    host = match["host"].strip("[]*").rstrip(".").lower()
    return _Allowed(host, below=bool(match["any"]), port=int(match["port"]) if match["port"] else None)


def _not_allowed(url: str, reason: str) -> ImageError:
    return ImageError(
        "image_source_unsupported",
        f"{shown(url)}: {reason}; send the image as a data URL, or have its host allowed (allow_image_hosts)",
    )


def _unreadable(url: str, reason: str) -> ImageError:
    return ImageError("image_not_readable", f"{shown(url)} cannot be fetched: {reason}")
