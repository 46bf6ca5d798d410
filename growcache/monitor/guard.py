"""Access control of the dashboard: host names, the token, and headers of every response."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_STORE = "no-store"  # unless a route says otherwise, because the content is of this moment
# An orchestrator's probes have no secrets, and get none.
PROBES = ("/healthz", "/readyz")
METRICS = "/metrics"
KNOWN = "growcache.known"  # key of a request: whether it may see reasons
NO_TOKEN = (
    "this dashboard needs its token: add ?token=… to the address once, or send it as "
    "Authorization: Bearer …\n"
)
COOKIE_SECONDS = 30 * 24 * 3600


class Guard:
    """Accepts requests with the token or, without a token, for this machine's loopback.

    A page of another site can make a browser send requests to a name that resolves to
    127.0.0.1. Such a request has that name as its Host, and is refused. With a token the name
    does not matter.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, prefix: str = "", *, public_metrics: bool = False
    ) -> None:
        self._app = app
        self._token = token
        self._prefix = prefix
        self._public = {*PROBES, METRICS} if public_metrics else {*PROBES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        scope[KNOWN] = refusal is None
        is_public = scope["path"].removeprefix(self._prefix) in self._public
        app = self._app if refusal is None or is_public else refusal
        await app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            return None if is_loopback_host(headers.get("host", "")) else _misdirected()
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == "token"), None)
        if given is not None and self._is_token(given):
            return self._redirect_with_cookie(scope, query)
        if self._is_token(_bearer(headers)) or self._has_cookie(scope, headers):
            return None
        return PlainTextResponse(NO_TOKEN, 401, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return self._is_digest(_digest(given))

    def _is_digest(self, given: str) -> bool:
        expected = _digest(self._token or "")
        return hmac.compare_digest(given.encode(errors="replace"), expected.encode())

    def _has_cookie(self, scope: Scope, headers: Headers) -> bool:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(_cookie_name(scope))
        return found is not None and self._is_digest(found.value)

    def _redirect_with_cookie(self, scope: Scope, query: Iterable[tuple[str, str]]) -> Response:
        """Remove the token from the address, so that it is in no history and no bookmark."""
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        here = "./" + quote(scope["path"].rsplit("/", 1)[-1])
        response = Response(
            status_code=303, headers={"Location": here + (f"?{rest}" if rest else "")}
        )
        response.set_cookie(
            _cookie_name(scope),
            _digest(self._token or ""),
            max_age=COOKIE_SECONDS,
            path=self._prefix or "/",
            httponly=True,
            samesite="strict",
            secure=scope["scheme"] == "https",
        )
        return response


def is_loopback_host(host: str) -> bool:
    """Whether a Host header is this machine's loopback, with any port because of `ssh -L`.

    >>> [is_loopback_host(host) for host in ("localhost:9999", "[::1]:8650", "::1", "127.0.0.2:80")]
    [True, True, True, True]
    >>> is_loopback_host("evil.example:8650"), is_loopback_host("127.0.0.1.evil.example")
    (False, False)
    """
    name, colon, port = host.rpartition(":")
    bare = (
        name if colon and port.isascii() and port.isdigit() and not name.endswith(":") else host
    )
    if bare.lower() == "localhost":
        return True
    try:
        return ip_address(bare.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _misdirected() -> Response:
    text = "this dashboard answers requests to localhost only; for another name start it with a token\n"
    return PlainTextResponse(text, 421)


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(token: str) -> str:
    return hashlib.sha256(b"growcache dashboard\0" + token.encode()).hexdigest()


def _cookie_name(scope: Scope) -> str:
    """Return a name with the port, because browsers send cookies to all ports of a host."""
    server = scope.get("server")
    return f"growcache_{server[1] if server else 0}"


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(HEADERS)
            headers.setdefault("Cache-Control", NO_STORE)
        await send(message)

    return sending
