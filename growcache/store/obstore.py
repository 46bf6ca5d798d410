"""S3, Google Cloud, Azure and web servers through obstore (Rust's object_store).

obstore does not support some keys that S3 allows. A second backend serves them, and is opened
for the first such key.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import obstore
from obstore.exceptions import BaseError, NotSupportedError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, StoreError
from growcache.store.contract import PAGE_ENTRIES, Entry, Page
from growcache.store.credentials import s3_settings, server_option
from growcache.store.response_check import (
    RangeSupport,
    Response,
    check_length,
    check_response,
    read_at_most,
)
from growcache.store.retries import stalled_seconds
from growcache.store.store_errors import UnsupportedKeyError, read_obstore_error, store_error
from growcache.store.urls import WEB_SCHEMES, Location, is_unsupported_key

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from typing_extensions import Buffer

    from growcache.store.contract import Backend

    AnyStore = AzureStore | GCSStore | HTTPStore | S3Store

_STREAM_CHUNK_BYTES = 1 << 20
OBSTORE_ERRORS = (BaseError, OSError, ValueError)

_GCS_NAMES = {"endpoint_url": "base_url", "anon": "skip_signature"}
_GCS_OPTIONS = frozenset(
    {"base_url", "skip_signature", "application_credentials", "service_account"}
)


class ObstoreBackend:
    def __init__(
        self, store: AnyStore, root: str, *, checks_answers: bool, option: str = ""
    ) -> None:
        self._store = store
        self._option = option
        self.identity = self._root = root
        # Azure always lists from the start, and S3 Express lists in an order of its own.
        self.sorted = isinstance(store, S3Store | GCSStore) and not root.endswith("--x-s3/")
        self._checks_answers = checks_answers
        self._ranges = RangeSupport(root)

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        held: Entry | None = None
        try:
            listing = obstore.list(
                self._store, location.prefix or None, offset=after, chunk_size=PAGE_ENTRIES
            )
            for metas in listing:
                page, held = _without_folders(held, [_listed_entry(meta) for meta in metas])
                if len(metas) < PAGE_ENTRIES:
                    break
                yield Page(page)
            else:
                page = []
        except OBSTORE_ERRORS as error:
            raise self._translated(error, "") from None
        yield Page([*page, held] if held else page, last=True)

    def head(self, key: str) -> Entry:
        try:
            return _entry_of_meta(obstore.head(self._store, key), key)
        except OBSTORE_ERRORS as error:
            raise self._translated(error, key) from None

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
        if self._ranges.has_ranges is False:
            return await self._cut_out(entry, start, stop)
        options: GetOptions = {}
        # A weak ETag never satisfies If-Match (RFC 9110 section 13.1.1).
        if (etag := entry.etag) is not None and not etag.startswith("W/"):
            options["if_match"] = etag
        if ranged := start > 0 or stop < entry.size:
            options["range"] = (start, stop)
        try:
            answer = await obstore.get_async(self._store, entry.key, options=options)
            check_response(entry, (start, stop), _response_of_result(answer, entry))
            if self._checks_answers:
                if ranged:
                    self._ranges.record(is_whole=False)
                return await read_at_most(_chunks_of(answer, stop - start), stop - start, entry)
            # The provider of a store with credentials is trusted to send answers of the right
            # length, because checking costs 40 % more CPU time per byte.
            return await answer.bytes_async()
        except NotSupportedError as error:
            if not self._checks_answers:
                raise self._translated(error, entry.key) from None
        except OBSTORE_ERRORS as error:
            raise self._translated(error, entry.key) from None
        self._ranges.record(is_whole=True)
        return await self._cut_out(entry, start, stop)

    async def _cut_out(self, entry: Entry, start: int, stop: int) -> Buffer:
        """Return a range of an object from a web server that answers with the whole object."""
        try:
            answer = await obstore.get_async(self._store, entry.key)
            check_response(entry, (0, entry.size), _response_of_result(answer, entry))
            data = await read_at_most(_chunks_of(answer, entry.size), entry.size, entry)
        except OBSTORE_ERRORS as error:
            raise self._translated(error, entry.key) from None
        check_length(entry, (0, entry.size), len(data))
        return data[start:stop]

    async def close(self) -> None:
        """Do nothing, because obstore closes its connections when it is garbage-collected."""

    def _translated(self, error: Exception, key: str) -> Exception:
        if isinstance(error, StoreError):
            return error
        return store_error(read_obstore_error(error), self._root, key, self._option)


def _chunks_of(answer: GetResult, most: int) -> AsyncIterable[Buffer]:
    return answer.stream(min_chunk_size=min(most, _STREAM_CHUNK_BYTES))


def _response_of_result(answer: GetResult, entry: Entry) -> Response:
    meta = answer.meta
    etag = meta["e_tag"]
    decides = etag and entry.etag  # if both have one, the time does not count
    modified = None if decides else meta["last_modified"].timestamp() or None  # 0 means unknown
    return Response(answer.range, meta["size"], etag, modified)


def _entry_of_meta(meta: ObjectMeta, key: str | None = None) -> Entry:
    modified = meta["last_modified"].timestamp()
    return Entry(key or meta["path"], meta["size"], meta["e_tag"], modified)


def _listed_entry(meta: ObjectMeta) -> Entry:
    """Return an entry with the ETag in the form of headers, because Azure's listings omit the quotes."""
    entry = _entry_of_meta(meta)
    if not (etag := entry.etag) or etag.endswith('"'):
        return entry
    return replace(entry, etag=f'"{etag}"')


def _without_folders(held: Entry | None, page: list[Entry]) -> tuple[list[Entry], Entry | None]:
    """Return a page without folder markers, and its last entry if that may be a marker.

    Consoles and mounts create empty objects called ``folder/`` next to the folder's content.
    obstore lists them without the slash, so only the next key shows that one is a marker.
    """
    rows = [held, *page] if held else page
    kept = [
        entry
        for entry, following in pairwise(rows)
        if entry.size or not following.key.startswith(entry.key + "/")
    ]
    if not rows:
        return [], None
    return (kept, rows[-1]) if not rows[-1].size else ([*kept, rows[-1]], None)


def open_obstore(
    location: Location, source: SourceConfig, timeout_seconds: float
) -> ObstoreBackend | None:
    """Return the backend of a location, or None if only fsspec can serve it."""
    opened = open_client(location, source, timeout_seconds)
    if opened is None and source.client == "obstore":
        raise ConfigError(
            f"source.client: obstore cannot serve {location.url} with these storage_options; "
            "use client: auto or fsspec",
            code="GC215",
        )
    if opened is None:
        return None
    option = server_option(location.scheme, source.storage_options)
    is_web = location.scheme in WEB_SCHEMES
    return ObstoreBackend(opened, location.root, checks_answers=is_web, option=option)


def open_client(
    location: Location, source: SourceConfig, timeout_seconds: float
) -> AnyStore | None:
    """Return obstore's client for a location, or None if obstore has none."""
    opener = _OPENERS.get(location.scheme)
    if opener is None:
        return None
    stalled = timedelta(seconds=stalled_seconds(timeout_seconds))
    settings = {
        "client_options": {
            "allow_http": True,
            "connect_timeout": min(stalled, timedelta(seconds=5)),
            "read_timeout": stalled,
            # Reading a large object may take any time.
            "timeout": timedelta(days=1),
        },
        # growcache retries itself, so that all clients behave alike and retries are counted.
        "retry_config": {"max_retries": 0},
    }
    try:
        return opener(location, source.storage_options, settings)
    except ConfigError:
        raise
    except (BaseError, TypeError, ValueError) as error:
        # Refusals by obstore here are about configuration, and their texts may have secrets.
        kind = type(error).__name__
        raise ConfigError(
            f"source {location.root}: its storage_options were refused ({kind}); "
            "check the endpoint, and the names and kinds of the options",
            code="GC215",
        ) from None


def _open_s3(
    location: Location, options: Mapping[str, Any], settings: dict[str, Any]
) -> AnyStore | None:
    found = s3_settings(location.bucket, options)
    if found is None:
        return None
    if isinstance(found.verify, str):
        with open(found.verify, "rb") as file:  # noqa: PTH123
            settings["client_options"]["root_certificate"] = file.read()
    elif not found.verify:
        settings["client_options"]["allow_invalid_certificates"] = True
    config, provider = cast(Any, found.config), cast(Any, found.provider)
    return S3Store(config=config, credential_provider=provider, **settings)


def _open_gcs(
    location: Location, options: Mapping[str, Any], settings: dict[str, Any]
) -> AnyStore | None:
    named = dict(options)
    if (token := named.pop("token", None)) is not None:
        if not isinstance(token, str) or token in ("cloud", "browser", "cache"):
            return None
        meanings: dict[str, dict[str, Any]] = {"anon": {"anon": True}, "google_default": {}}
        named |= meanings.get(token, {"application_credentials": token})
    config: Any = {_GCS_NAMES.get(k, k): v for k, v in named.items() if v is not None}
    return (
        GCSStore(location.bucket, config=config, **settings)
        if set(config) <= _GCS_OPTIONS
        else None
    )


def _open_azure(
    location: Location, options: Mapping[str, Any], settings: dict[str, Any]
) -> AnyStore | None:
    container, _, host = location.bucket.partition("@")
    config: Any = azure_settings(host, options)
    return None if config is None else AzureStore(container, config=config, **settings)


_AZURE_PUBLIC_CLOUD = "core.windows.net"
_ADLFS_NAMES = {"sas_token": "sas_key", "anon": "skip_signature", "endpoint_url": "endpoint"}
_CONNECTION_STRING_NAMES = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_AZURE_OBSTORE_NAMES = frozenset(
    {"account_name", "account_key", "sas_key", "skip_signature", "endpoint", "use_emulator",
     "client_id", "client_secret", "tenant_id"}
)  # fmt: skip


def azure_settings(host: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    found = parse_azure_host(host) if host else {}
    if found is None:
        return None
    given = {name: value for name, value in options.items() if value is not None}
    if (text := given.pop("connection_string", None)) is not None:
        found |= parse_connection_string(str(text))
    found |= {_ADLFS_NAMES.get(name, name): value for name, value in given.items()}
    return found if set(found) <= _AZURE_OBSTORE_NAMES else None


def parse_azure_host(host: str) -> dict[str, Any] | None:
    """Return the account and endpoint in a host's name, or None if it is not a usual name of Azure.

    >>> parse_azure_host("a.dfs.core.windows.net")
    {'account_name': 'a'}
    >>> parse_azure_host("a.dfs.core.chinacloudapi.cn")["endpoint"]
    'https://a.blob.core.chinacloudapi.cn'
    >>> parse_azure_host("onelake.dfs.fabric.microsoft.com")
    """
    found = re.fullmatch(r"([a-z0-9]+)\.(?:dfs|blob)\.(core\.[a-z.]+)", host)
    return found and _with_endpoint({"account_name": found[1]}, "https", found[2])


def parse_connection_string(text: str) -> dict[str, Any]:
    """Return the settings in a connection string.

    Raises:
        ConfigError: The string names no account.

    >>> parse_connection_string("AccountName=a;AccountKey=b==;BlobEndpoint=http://h/a;")
    {'account_name': 'a', 'account_key': 'b==', 'endpoint': 'http://h/a'}
    """
    said = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    found = {own: said[name] for name, own in _CONNECTION_STRING_NAMES.items() if name in said}
    if "account_name" not in found and "endpoint" not in found:
        raise ConfigError(
            "source.storage_options: expected a connection_string with AccountName=…;AccountKey=…",
            code="GC215",
        )
    scheme = said.get("DefaultEndpointsProtocol", "https")
    return _with_endpoint(found, scheme, said.get("EndpointSuffix", _AZURE_PUBLIC_CLOUD))


def _with_endpoint(found: dict[str, Any], scheme: str, suffix: str) -> dict[str, Any]:
    if suffix == _AZURE_PUBLIC_CLOUD or "account_name" not in found:
        return found
    return {"endpoint": f"{scheme}://{found['account_name']}.blob.{suffix}", **found}


def _open_web(
    location: Location, options: Mapping[str, Any], settings: dict[str, Any]
) -> AnyStore | None:
    # fsspec's client supports pages of links, queries and headers.
    is_plain = location.is_key and "?" not in location.pattern
    if not is_plain or location.userinfo or location.signed_key or options:
        return None
    return HTTPStore.from_url(f"{location.scheme}://{location.bucket}", **settings)


_OPENERS = {
    **dict.fromkeys(("s3", "s3a"), _open_s3),
    **dict.fromkeys(("gs", "gcs"), _open_gcs),
    **dict.fromkeys(("az", "abfs", "abfss"), _open_azure),
    **dict.fromkeys(("http", "https"), _open_web),
}
logger = logging.getLogger(__name__)


class UnsupportedKeysBackend:
    """obstore's backend, with a second one for the keys that obstore does not support.

    obstore's listing hides a slash at the start or end of a key, so such an object becomes a
    hole.
    """

    def __init__(self, usual: Backend, opened: Callable[[], Backend]) -> None:
        self.identity = usual.identity
        self.sorted = usual.sorted
        self._usual = usual
        self._open = opened
        self._made: Backend | None = None

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        last = after
        if self._made is None:
            try:
                for page in self._usual.listing(location, after):
                    last = page[-1].key if page else last
                    yield page
            except UnsupportedKeyError as error:
                logger.info("%s; fsspec lists the rest", error)
            else:
                return
        yield from self._other.listing(location, last)

    def head(self, key: str) -> Entry:
        return self._for(key).head(key)

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        return self._for(entry.key).get(entry, start, stop)

    async def close(self) -> None:
        await self._usual.close()
        if self._made is not None:
            await self._made.close()

    @property
    def _other(self) -> Backend:
        if self._made is None:
            self._made = self._open()
        return self._made

    def _for(self, key: str) -> Backend:
        return self._other if is_unsupported_key(key) else self._usual
