"""Backend for every URL and option that obstore does not support.

fsspec's own reads request no version and accept any range, so this module has a conditional
read per protocol. A web session sends its secrets only to the servers of ``source.url``,
because aiohttp would send them along a redirect.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import (
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.secrecy import url_without_secrets
from growcache.store.adlfs_options import AZURE_SCHEMES, adlfs_options
from growcache.store.contract import Entry, Page, paginate
from growcache.store.credentials import server_address, server_option, with_guarded_sessions
from growcache.store.listing import folder_path, walk_folders
from growcache.store.response_check import (
    BrokenReadError,
    RangeSupport,
    check_has_version,
    check_length,
    check_range,
    check_response,
    check_same_version,
    http_seconds,
    read_at_most,
    response_of,
)
from growcache.store.retries import stalled_seconds
from growcache.store.store_errors import is_client_error, read_fsspec_error, store_error
from growcache.store.urls import BUCKET_SCHEMES, S3_SCHEMES, WEB_SCHEMES, Location

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)


class FsspecBackend:
    def __init__(
        self,
        open_fs: Callable[[], Any],
        location: Location,
        root: str,
        concurrency: int,
        option: str = "",
    ) -> None:
        self._open = open_fs
        self._option = option
        self._fs = open_fs()
        self.location = location
        self._root = root
        # A signed address is an object of its own, although another address may have the same
        # key.
        self.identity = location.root + location.signed_key if root else str(hash(self._fs))
        self.sorted = location.scheme in S3_SCHEMES and not root.endswith("--x-s3/")
        self._is_async = isinstance(self._fs, AsyncFileSystem) and self._fs.async_impl
        # Some clients are not thread-safe, so each thread has its own.
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(min(8, concurrency), "growcache-fsspec")
        self._get_async = range_getter(location) if self._is_async else get_plain

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        try:
            if location.scheme in S3_SCHEMES:
                yield from s3_pages(self._fs, self._root.rstrip("/"), location.prefix, after)
            else:
                yield from map(self._with_sizes, paginate(self._files(location, after)))
        except Exception as error:  # noqa: BLE001 - from any client; see _translated
            raise self._translated(error, "") from None

    def head(self, key: str) -> Entry:
        try:
            info = self._fs.info(self._path(key))
        except Exception as error:  # noqa: BLE001
            raise self._translated(error, key) from None
        if info["type"] == "directory":
            raise ObjectMissingError(
                f"{self.location.root}{key} is a folder; to take what is below it, end "
                "source.url with /"
            )
        return entry_of_info(key, info)

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
        try:
            if self._is_async:
                # Its sessions belong to one loop, which it runs in a thread. So listing (which
                # blocks) and reading share one client.
                work = self._get_async(self._fs, self._path(entry.key), entry, start, stop)
                reading = asyncio.run_coroutine_threadsafe(work, self._fs.loop)
                return await asyncio.wrap_future(reading)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._get, entry, start, stop)
        except Exception as error:  # noqa: BLE001
            raise self._translated(error, entry.key) from None

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, entry: Entry, start: int, stop: int) -> bytes:
        fs = getattr(self._own, "fs", None)
        if fs is None:
            fs = self._own.fs = self._open()
        path = self._path(entry.key)
        data: bytes = fs.cat_file(path, start, stop)
        # After the read, so that a write before or during it is noticed.
        check_same_version(entry, entry_of_info(entry.key, fs.info(path)))
        return data

    def _path(self, key: str) -> str:
        signed = self.location.signed_key and key == self.location.pattern
        return self._root + (self.location.signed_key if signed else key)

    def _files(self, location: Location, after: str | None) -> Iterator[Mapping[str, Any]]:
        top = folder_path(self._root + location.prefix) or self._fs.root_marker
        self._fs.invalidate_cache()
        last = None if after is None else self._root + after
        for info in walk_folders(self._fs, top, location.depth, last):
            if location.scheme in WEB_SCHEMES and "?" in info["name"]:
                continue  # a link that sorts the page by another column, as in Apache's pages
            if location.scheme in WEB_SCHEMES and not location.matches(self._key(info)):
                continue  # each of its files would cost a request for its size
            yield info

    def _with_sizes(self, page: list[Mapping[str, Any]]) -> Page:
        """Return the entries with sizes.

        A web server's listing lacks them, so each costs a request.
        """
        if any(info["size"] is None for info in page):
            asked = list(self._threads.map(self._info_of_link, page))
            page = [info for info in asked if info is not None]
            if dead := len(asked) - len(page):
                logger.warning("listing has %d broken links in %s", dead, self.location.url)
        return Page(entry_of_info(self._key(info), info) for info in page)

    def _key(self, info: Mapping[str, Any]) -> str:
        return str(info["name"]).removeprefix(self._root)

    def _info_of_link(self, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = self._fs.info(info["name"])
        except Exception as error:
            if is_client_error(error) and read_fsspec_error(error).status in (404, 410):
                return None
            raise
        return found

    def _translated(self, error: Exception, key: str) -> Exception:
        if isinstance(error, StoreError):
            return error
        if not is_client_error(error):
            where = f"{self.location.root}{key}"
            if isinstance(error, ValueError) and key:  # the client cannot express this key
                return StoreError(f"{where}: {type(error).__name__}: {error}")
            if isinstance(error, TypeError | ValueError | KeyError) and not key:
                return ConfigError(
                    f"source {where.rstrip('/')}: its storage_options were refused "
                    f"({type(error).__name__}: {error})",
                    code="GC215",
                )
            return error  # a bug
        explained = store_error(read_fsspec_error(error), self.location.root, key, self._option)
        return _name_redirected_server(error, explained, self.location.root)


def _name_redirected_server(error: Exception, explained: StoreError, root: str) -> StoreError:
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
    asked = getattr(getattr(cause, "request_info", None), "url", None)
    if not isinstance(explained, AccessError) or asked is None:
        return explained
    if server_address(str(asked)) == server_address(root):
        return explained
    server = "{}://{}:{}".format(*server_address(str(asked)))
    made = type(explained)(
        f"{explained}; {server} refused, to which {root} redirects: headers, cookies and "
        "passwords go to the server of source.url only, so name the other one there if it may "
        "receive them",
        code=explained.code,
    )
    made.exit_code = explained.exit_code
    return made


_EXTRA_OF_SCHEME = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure"),
}


def open_fsspec(
    location: Location,
    url: str,
    source: SourceConfig,
    concurrency: int,
    timeout_seconds: float,
) -> FsspecBackend:
    options = dict(source.storage_options)
    if location.scheme in S3_SCHEMES:
        options = _s3_options(options, concurrency, timeout_seconds)
    elif location.scheme in AZURE_SCHEMES:
        options = adlfs_options(location, options)
    elif location.scheme in WEB_SCHEMES:
        try:
            from aiohttp import ClientTimeout
        except ImportError:
            raise ConfigError(
                f"source.url {location.url}: index pages, globs and options of web servers need "
                "aiohttp: pip install 'growcache[http]'",
                code="GC801",
            ) from None
        stalled = stalled_seconds(timeout_seconds)
        options.setdefault("timeout", ClientTimeout(None, sock_connect=5, sock_read=stalled))
    options = with_guarded_sessions(url, options)

    def open_fs() -> Any:
        fs = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)[0]
        if location.scheme in S3_SCHEMES:
            fs.retries = 1
        return fs

    try:
        fs, path = url_to_fs(url, **options)
        folder = "/" if url.endswith("/") and not path.endswith("/") else ""
        if location.scheme in BUCKET_SCHEMES:
            root = f"{location.scheme}://{location.userinfo}{location.bucket}/"
            if location.scheme not in WEB_SCHEMES:  # adlfs's names have no @ACCOUNT
                root = location.bucket.partition("@")[0] + "/"
        else:
            root = ""
            if url_without_secrets(path) != path:  # keys are stored in shards and the index
                raise ConfigError(
                    f"source.url {location.url}: credentials in an address behind :: would "
                    "become part of keys; put them into source.storage_options",
                    code="GC111",
                )
            location = replace(location, pattern=path + folder)
        del fs
        option = server_option(location.scheme, source.storage_options)
        return FsspecBackend(open_fs, location, root, concurrency, option)
    except (ImportError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, KeyError):
            error = ValueError(f"storage_options lack {error}")
        if isinstance(error, ValueError) and "@" in url:
            # urllib would quote a part of the password, which it takes for a port.
            error = ValueError("its user and password have to be percent-encoded")
        if isinstance(error, ImportError) and (extra := _EXTRA_OF_SCHEME.get(location.scheme)):
            error = ImportError(f"{error}: pip install 'growcache[{extra}]'")
        known = "" if location.scheme in fsspec.available_protocols() else "; see fsspec's docs"
        raise ConfigError(f"source.url {location.url}: {error}{known}", code="GC111") from None


def _s3_options(
    options: dict[str, Any], concurrency: int, timeout_seconds: float
) -> dict[str, Any]:
    """Return options without the client's own retries, and with a connection per read in flight."""
    stalled = stalled_seconds(timeout_seconds)
    config = {
        "read_timeout": stalled,
        "connect_timeout": min(stalled, 5),
        "retries": {"max_attempts": 0},
        "max_pool_connections": max(10, concurrency),
        **options.get("config_kwargs", {}),
    }
    return {**options, "config_kwargs": config}


_CHUNK_BYTES = 1 << 24  # at most, whatever length a server announces
RangeGetter = Callable[[Any, str, Entry, int, int], Coroutine[Any, Any, bytes]]
_MTIME_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def entry_of_info(key: str, info: Mapping[str, Any]) -> Entry:
    etag = info.get("ETag") or info.get("etag")
    if info["size"] is None:
        raise StoreError(f"{key}: the store does not report its size, so it cannot be divided")
    # A web server's ETag is enough. Without one, the time is the version.
    modified = _mtime_of_info(info)
    if modified is None and not etag:
        modified = http_seconds(info.get("Last-Modified"))
    return Entry(key, int(info["size"]), etag and str(etag), modified)


def _mtime_of_info(info: Mapping[str, Any]) -> float | None:
    for name in _MTIME_NAMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None


async def get_plain(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    data: bytes = await fs._cat_file(path, start=start, end=stop)
    check_same_version(entry, entry_of_info(entry.key, await fs._info(path)))
    return data


async def _get_s3(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """Read by one conditional request.

    `_cat_file` asks for the size first and names no version.
    """
    wanted = {"IfMatch": entry.etag} if entry.etag else {}
    if ranged := _is_partial(entry, start, stop):
        wanted["Range"] = f"bytes={start}-{stop - 1}"
    bucket = path.partition("/")[0]
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=entry.key, **wanted)
    body = answer["Body"]
    async with body:  # older versions of aiobotocore return a response without iter_chunks here
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        _require_partial(entry, ranged, status)
        check_response(entry, (start, stop), response_of(entry, (start, stop), status, headers))
        return await read_at_most(body.iter_chunks(_CHUNK_BYTES), stop - start, entry)


async def _get_gcs(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """Read like `get_plain`, and check the range of the answer, which `_cat_file` does not."""
    ranged = _is_partial(entry, start, stop)
    headers = {"Range": f"bytes={start}-{stop - 1}"} if ranged else {}
    status, response_headers, _, data = await fs._request("GET", fs.url(path), headers=headers)
    _require_partial(entry, ranged, status)
    # Its ETag differs from the listing's, so a second request compares the version.
    response = response_of(entry, (start, stop), status, response_headers)
    check_range(entry, (start, stop), response)
    check_has_version(entry, response)
    if "content-encoding" in response_headers and len(data) != stop - start:
        raise StoreError(
            f"{entry.key}: expected {stop - start} bytes, found {len(data)}: it is stored with "
            f"Content-Encoding {response_headers['content-encoding']}, which the client unpacks; store it "
            "without"
        )
    check_same_version(entry, entry_of_info(entry.key, await fs._info(path)))
    return bytes(data)


async def _get_azure(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """Read by one conditional download. `_cat_file` names no version and accepts any range."""
    from azure.core import MatchConditions

    condition = {"etag": entry.etag, "match_condition": MatchConditions.IfNotModified}
    container, blob, version = fs.split_path(path)
    async with fs.service_client.get_blob_client(container, blob) as client:
        try:
            download = await client.download_blob(
                offset=start,
                length=stop - start,
                version_id=version,
                max_concurrency=fs.max_concurrency,
                raw_response_hook=partial(_check_azure_response, entry),
                **(condition if entry.etag else {}),
                **fs._timeout_kwargs,
            )
            return bytes(await download.readall())
        except (IndexError, ValueError):  # raised when the client parses the header
            raise BrokenReadError(
                f"{entry.key}: the store sent a part of the object without saying which"
            ) from None


def _check_azure_response(entry: Entry, answer: Any) -> None:
    # A download consists of several responses.
    response = answer.http_response
    if response.status_code not in (200, 206):
        return
    headers = answer.http_request.headers
    asked = headers.get("x-ms-range") or headers.get("Range") or ""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    wanted = (int(first or 0), min(int(last) + 1 if last else entry.size, entry.size))
    _require_partial(entry, bool(asked), response.status_code)
    check_response(
        entry, wanted, response_of(entry, wanted, response.status_code, response.headers)
    )


def _is_partial(entry: Entry, start: int, stop: int) -> bool:
    return start > 0 or stop < entry.size


def _require_partial(entry: Entry, ranged: bool, status: int) -> None:
    if ranged and status != 206:
        raise BrokenReadError(
            f"{entry.key}: expected a part of the object (206), the store answered {status}"
        )


async def _get_web(
    support: RangeSupport, fs: Any, address: str, entry: Entry, start: int, stop: int
) -> bytes:
    settings = dict(fs.kwargs)
    # A range of compressed content would have other bytes, and a size that only the server
    # knows.
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    if ranged := _is_partial(entry, start, stop):
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if entry.etag and not entry.etag.startswith("W/"):
        headers["If-Match"] = entry.etag
    session = await fs.set_session()
    async with session.get(fs.encode_url(address), headers=headers, **settings) as answer:
        answer.raise_for_status()
        is_whole = answer.status != 206
        wanted = (0, entry.size) if is_whole else (start, stop)
        response = response_of(entry, wanted, answer.status, answer.headers)
        check_response(entry, wanted, response)
        if ranged:
            support.record(is_whole=is_whole)
        chunks = answer.content.iter_chunked(_CHUNK_BYTES)
        data = await read_at_most(chunks, wanted[1] - wanted[0], entry)
    check_length(entry, wanted, len(data))
    return data[start:stop] if is_whole else data


_GETTERS: Mapping[str, RangeGetter] = {
    **dict.fromkeys(("s3", "s3a"), _get_s3),
    **dict.fromkeys(("gs", "gcs"), _get_gcs),
    **dict.fromkeys(("az", "abfs", "abfss"), _get_azure),
}


def range_getter(location: Location) -> RangeGetter:
    if location.scheme in WEB_SCHEMES:
        return partial(_get_web, RangeSupport(location.root))
    return _GETTERS.get(location.scheme, get_plain)


def s3_pages(fs: Any, bucket: str, prefix: str, after: str | None) -> Iterator[Page]:
    """Yield each page when it arrives, because fsspec's `find` returns all pages at the end."""
    more = {"StartAfter": after} if after else {}
    fs.connect()  # separately, because a refused option is not an error of the listing
    while True:
        answer = _s3_page(fs, bucket, Prefix=prefix, **more)
        last = not answer.get("IsTruncated")
        yield Page(_s3_entries(bucket, answer.get("Contents", ())), last=last)
        if last:
            return
        token = answer.get("NextContinuationToken")
        if not token or token == more.get("ContinuationToken"):
            raise StoreError(
                f"s3://{bucket}: the listing does not say where its next page begins, so it "
                "cannot be listed to its end",
                code="GC214",
            )
        more = {"ContinuationToken": token}


def _s3_page(fs: Any, bucket: str, **asked: str) -> Mapping[str, Any]:
    try:
        answer: Mapping[str, Any] = fs.call_s3("list_objects_v2", Bucket=bucket, **asked)
    except (
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # raised when the library parses the answer
        raise StoreError(
            f"s3://{bucket}: its listing cannot be read ({type(error).__name__}: {error})",
            code="GC214",
        ) from None
    if not _S3_LISTING_FIELDS & answer.keys():
        raise TransientStoreError(f"s3://{bucket}: its answer is not a listing", code="GC214")
    return answer


# Every S3 server sends at least one of these elements, even for an empty listing.
_S3_LISTING_FIELDS = frozenset({"IsTruncated", "KeyCount", "Name", "Contents"})


def _s3_entries(bucket: str, rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    try:
        return [
            Entry(row["Key"], row["Size"], row.get("ETag"), row["LastModified"].timestamp())
            for row in rows
            if row["Size"] or not row["Key"].endswith("/")
        ]
    except KeyError as error:
        raise StoreError(
            f"s3://{bucket}: an entry of the listing lacks {error.args[0]}, so it cannot be used",
            code="GC214",
        ) from None
