"""Sessions of aiohttp: a user's headers go to the user's server, and to no other.

Servers redirect, and aiohttp then sends headers, cookies and the session's user along, but for
an Authorization header. A server that was named without them shall not learn them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from growcache.remote.urls import WEB

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientResponse, ClientSession

    Handler = Callable[[ClientRequest], Awaitable[ClientResponse]]

Origin = tuple[str, str, int]

_PORTS = {"http": 80, "https": 443}
# They say what is asked for, and by which program, not who asks.
_HARMLESS = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})


@dataclass(frozen=True)
class OwnSession:
    """Makes sessions for fsspec's HTTP file system.

    Attributes:
        origins: servers that are given everything.
        headers: names, in lower case, of those that other servers are not sent.
        cookies: names of those that other servers are not sent.
        users: Authorization headers that other servers are not sent.
        checks_ranges: whether a response has to be the range that was asked for.
    """

    origins: frozenset[Origin]
    headers: frozenset[str]
    cookies: frozenset[str]
    users: frozenset[str] = field(repr=False)
    checks_ranges: bool

    async def __call__(self, **options: Any) -> ClientSession:
        """Return a session; called by fsspec."""
        from aiohttp import ClientSession

        # Where nothing is to be kept back, it would take a twentieth of a small read for nothing.
        if self.headers or self.cookies or self.users or self.checks_ranges:
            options["middlewares"] = (*options.get("middlewares", ()), self._guarded)
        return ClientSession(**options)

    async def _guarded(self, request: ClientRequest, handler: Handler) -> ClientResponse:
        """Send one request, which may be one that follows a redirect."""
        url = request.url
        # The first is looked at at once, the second says how a name beyond ASCII is sent.
        origin = url.scheme, url.host, url.port
        if origin not in self.origins and origin_of(str(url)) not in self.origins:
            self._strip(request.headers)
        response = await handler(request)
        if self.checks_ranges and response.status == 206:
            asked = request.headers.get("Range", "")
            if not is_wanted_range(asked, response.headers.get("Content-Range", "")):
                from aiohttp import ClientPayloadError

                response.close()
                raise ClientPayloadError(f"another range than {asked}")
        return response

    def _strip(self, headers: Any) -> None:
        for name in self.headers:
            headers.popall(name, None)
        if headers.get("Authorization") in self.users:
            headers.popall("Authorization")
        cookies = "; ".join(headers.popall("Cookie", ()))
        if kept := kept_cookies(cookies, self.cookies):
            headers["Cookie"] = kept


def own_session(
    addresses: Iterable[str], options: Mapping[str, Any], *, checks_ranges: bool
) -> OwnSession:
    """Return what makes sessions for these addresses.

    Args:
        addresses: of the source.
        options: of fsspec's HTTP file system.
        checks_ranges: see `OwnSession`.
    """
    places = [options, options.get("client_kwargs") or {}]
    headers = {str(name).lower() for place in places for name in place.get("headers") or ()}
    cookies = {str(name) for place in places for name in place.get("cookies") or ()}
    users = {place["auth"].encode() for place in places if place.get("auth")}
    return OwnSession(
        frozenset(map(origin_of, addresses)),
        frozenset(headers - _HARMLESS),
        frozenset(cookies),
        frozenset(users),
        checks_ranges,
    )


def with_own_sessions(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a URL so that its web servers are asked by `OwnSession`.

    Args:
        url: as typed; of a chain of file systems the options of each stand under its scheme.
        options: of fsspec, whose own ``get_client`` is kept.
    """
    addresses = [part for part in url.split("::") if urlsplit(part).scheme in WEB]
    made = dict(options)
    if "::" not in url:
        session = own_session(addresses, options, checks_ranges=False)
        return {"get_client": session, **made} if addresses else made
    for scheme in {urlsplit(address).scheme for address in addresses}:
        own = dict(options.get(scheme) or {})
        session = own_session(addresses, own, checks_ranges=True)
        made[scheme] = {"get_client": session, **own}
    return made


def origin_of(address: str) -> Origin:
    """Return scheme, host and port of a web address.

    >>> origin_of("http://u:p@Lab.org/x"), origin_of("https://lab.org:80/")
    (('http', 'lab.org', 80), ('https', 'lab.org', 80))
    """
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)


def kept_cookies(text: str, without: frozenset[str]) -> str:
    """Return a Cookie header without some of its cookies.

    >>> kept_cookies("a=1; b=2; c=3", frozenset({"b"}))
    'a=1; c=3'
    """
    return "; ".join(
        part for part in text.split("; ") if part.partition("=")[0].strip() not in without
    )


def is_wanted_range(asked: str, told: str) -> bool:
    """Whether a Content-Range header answers a Range header.

    A range may end earlier than it was asked for, because the object does.

    >>> is_wanted_range("bytes=5-9", "bytes 5-9/20"), is_wanted_range("bytes=5-9", "bytes 0-4/20")
    (True, False)
    >>> is_wanted_range("bytes=5-9", "bytes 5-7/8"), is_wanted_range("bytes=-4", "bytes 16-19/20")
    (True, True)
    """
    found = re.fullmatch(r"\s*bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", told)
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", asked)
    if found is None or wanted is None:
        return False
    first, last, total = int(found[1]), int(found[2]), found[3]
    if not wanted[1]:  # the end of it
        return last - first + 1 <= int(wanted[2]) and total in (str(last + 1), "*")
    is_end = total in (str(last + 1), "*")
    return first == int(wanted[1]) and (str(last) == wanted[2] or is_end)
