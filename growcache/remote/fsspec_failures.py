"""Why a client of fsspec's had no answer, and from whom: each library has its own exceptions."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from growcache.remote.answers import LATE, REFUSED, RESET, UNRESOLVED
from growcache.usercode import short

_BY_ERRNO = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: RESET,
    errno.EPIPE: RESET,
    errno.ETIMEDOUT: LATE,
    errno.EHOSTUNREACH: "no route to host",
    errno.ENETUNREACH: "network unreachable",
}
_DEEPEST = 8  # causes of causes


def connection_failure(error: BaseException) -> tuple[str, str]:
    """Return the cause in words, and the host and port that were asked, where they are known."""
    causes = list(_causes(error))
    cause = next(filter(None, map(_cause, causes)), "")
    address = next(filter(None, map(_address, causes)), "")
    words = getattr(error, "strerror", None) or type(error).__name__
    return cause or f"no answer ({words})", address


def credentials_failure(error: BaseException) -> str | None:
    """Return why there are no credentials to ask with; None where that is not what is wrong."""
    for one in _causes(error):
        if type(one).__name__ in _NO_CREDENTIALS:
            said = " ".join(str(one).split())
            return short(f"{type(one).__name__}: {said}" if said else type(one).__name__)
    return None


# What botocore, google-auth and azure-identity raise before any store is asked.
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
     "TokenRetrievalError", "UnauthorizedSSOTokenError", "SSOTokenLoadError", "SSOError",
     "ProfileNotFound", "RefreshWithMFAUnsupportedError", "MetadataRetrievalError",
     "LoginRefreshRequired", "RefreshError", "DefaultCredentialsError",
     "CredentialUnavailableError", "ClientAuthenticationError"}
)  # fmt: skip


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it came from, by whatever name its library keeps that."""
    found: BaseException | None = error
    for _ in range(_DEEPEST):
        if found is None:
            return
        yield found
        kept = getattr(found, "inner_exception", None)  # Azure's
        found = (
            kept if isinstance(kept, BaseException) else found.__cause__ or found.__context__
        )


def _cause(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return UNRESOLVED
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return LATE
    return _BY_ERRNO.get(getattr(error, "errno", None) or 0, "")


def _address(error: BaseException) -> str:
    """Return host and port, of aiohttp's exceptions and of botocore's."""
    host, port = getattr(error, "host", None), getattr(error, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return f"{host}:{port}"
    kept = getattr(error, "kwargs", None)
    url = kept.get("endpoint_url") if isinstance(kept, dict) else None
    return urlsplit(url).netloc.rpartition("@")[2] if isinstance(url, str) else ""
