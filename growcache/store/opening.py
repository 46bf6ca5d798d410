"""Open the store of a source: choose the client of each URL, and share clients of one server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, TransientStoreError
from growcache.store.contract import Backend
from growcache.store.read_slots import ReadMeter
from growcache.store.retries import RenewableBackend, RetryPolicy
from growcache.store.store import ClientSettings, RemoteStore
from growcache.store.urls import BUCKET_SCHEMES, SSH_SCHEMES, WEB_SCHEMES, Location, parse_url


def open_store(
    source: SourceConfig,
    *,
    concurrency: int = 16,
    timeout_seconds: float = 60,
    on_retry: Callable[[BaseException], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    without_credentials: bool = False,
    retries_forever: Callable[[TransientStoreError], bool] | None = None,
    meter: ReadMeter | None = None,
) -> RemoteStore:
    """Return the store of a source, without a request yet.

    Args:
        source: URLs, storage options and client.
        concurrency: Number of reads in flight.
        timeout_seconds: Time without progress after which a read or a listing is given up.
        on_retry: Called with every failure that is retried, in the thread of the failure.
        on_bytes: Called with the size of every successful read.
        without_credentials: Without credentials, raise at the first request rather than now.
        retries_forever: Tells whether a failure is retried without end; see `RetryPolicy`.
        meter: Books every attempt at a read before it starts.

    Raises:
        ConfigError: No client understands a URL or an option.
        CredentialsError: No credentials were found.
    """
    clients: dict[tuple[object, ...], RenewableBackend] = {}
    opened: list[tuple[Location, RenewableBackend]] = []
    settings = ClientSettings(source, concurrency, timeout_seconds)
    for url in source.url:
        location = parse_url(url)
        key = _client_key(location, url, source)
        if key not in clients:
            client = clients[key] = RenewableBackend(
                partial(_open_backend, location, url, settings),
                without_credentials=without_credentials,
                timeout_seconds=timeout_seconds,
            )
            # Custom file systems of fsspec may have keys of their own.
            location = getattr(client.backend, "location", location)
        opened.append((location, clients[key]))
    retries = RetryPolicy(timeout_seconds, on_retry, retries_forever)
    return RemoteStore(source, opened, retries, concurrency, on_bytes, settings, meter)


def _client_key(location: Location, url: str, source: SourceConfig) -> tuple[object, ...]:
    if location.scheme == "file" and source.client != "fsspec":
        return ("file",)
    if location.scheme in SSH_SCHEMES:
        return tuple(url.split("/", 3)[:3])  # host and user
    if location.scheme in BUCKET_SCHEMES:
        is_web_key = location.scheme in WEB_SCHEMES and location.is_key
        return (location.root, location.userinfo, location.signed_key, is_web_key)
    return (url,)


def _open_backend(location: Location, url: str, settings: ClientSettings) -> Backend:
    """Open the client of a URL.

    The import is here, because a sampler needs one client of four.
    """
    source, timeout_seconds = settings.source, settings.timeout_seconds

    def opened_by_fsspec() -> Backend:
        from growcache.store.fsspec import open_fsspec

        return open_fsspec(
            location, url, settings.source, settings.concurrency, timeout_seconds
        )

    if location.scheme in SSH_SCHEMES and source.client != "obstore":
        try:
            from growcache.store.sftp import open_sftp
        except ImportError:
            raise ConfigError(
                f"source.url {location.url}: SFTP needs asyncssh: pip install 'growcache[sftp]'",
                code="GC801",
            ) from None
        return open_sftp(location, url, source, settings.concurrency, timeout_seconds)
    if location.scheme == "file" and source.client == "auto":
        from growcache.store.local import LocalBackend

        return LocalBackend(settings.concurrency)
    if source.client != "fsspec":
        from growcache.store.obstore import UnsupportedKeysBackend, open_obstore

        opened = open_obstore(location, source, timeout_seconds)
        if opened is not None and source.client == "obstore":
            return opened
        if opened is not None:
            return UnsupportedKeysBackend(opened, opened_by_fsspec)
    return opened_by_fsspec()
