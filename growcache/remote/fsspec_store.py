"""Every other URL, and every option obstore has no word for, through fsspec."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from growcache.config import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.remote.answers import NO_CREDENTIALS, UNTRUSTED, Answer, explain
from growcache.remote.credentials import server_option
from growcache.remote.fsspec_failures import connection_failure, credentials_failure
from growcache.remote.response_check import (
    BrokenReadError,
    check_length,
    check_range,
    check_response,
    check_told,
    http_seconds,
    response_of,
)
from growcache.remote.retry import stalled_seconds
from growcache.remote.store import PAGE, Entry, Page
from growcache.remote.urls import BUCKETS, WEB, Location
from growcache.remote.web_session import origin_of, with_own_sessions
from growcache.remote.whole import RangeSupport
from growcache.secrecy import public_url
from growcache.usercode import short

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_S3 = frozenset({"s3", "s3a"})
_PIECE_BYTES = 1 << 24  # read at once, whatever a server promises
Getter = Callable[[Any, str, Entry, int, int], Coroutine[Any, Any, bytes]]
_HEADER = "Last-Modified"
_MODIFIED = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FsspecBackend:
    """One fsspec file system; ``root`` is what its paths have before our keys."""

    def __init__(
        self,
        opened: Callable[[], Any],
        location: Location,
        root: str,
        concurrency: int,
        option: str = "",
    ) -> None:
        self._open = opened
        self._option = option
        self._fs = opened()
        self._location = location
        self._root = root
        # A signed address is an object of its own; its key may be that of another one.
        self.identity = location.root + location.asked if root else str(hash(self._fs))
        self.sorted = location.scheme in _S3 and not root.endswith("--x-s3/")
        self._is_async = isinstance(self._fs, AsyncFileSystem) and self._fs.async_impl
        # Clients such as paramiko's are not meant for several threads: one for each.
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(min(8, concurrency), "growcache-fsspec")
        self._get_async = _getter(location) if self._is_async else _plain_get

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        """See `Backend.listing`."""
        try:
            if location.scheme in _S3:
                yield from _s3_pages(self._fs, self._root.rstrip("/"), location.prefix, after)
            else:
                yield from self._walked(location, after)
        except Exception as error:  # noqa: BLE001 - clients of any make; see _translated
            raise self._translated(error, "") from None

    def head(self, key: str) -> Entry:
        """See `Backend.head`."""
        try:
            info = self._fs.info(self._path(key))
        except Exception as error:  # noqa: BLE001
            raise self._translated(error, key) from None
        if info["type"] == "directory":
            raise ObjectMissingError(
                f"{self._location.root}{key} is a folder; to take what is below it, end "
                "source.url with /"
            )
        return _entry(key, info)

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
        """See `Backend.get`."""
        try:
            if self._is_async:
                # Its sessions belong to one loop, which it keeps in a thread; so listing (which
                # blocks) and reading share one.
                work = self._get_async(self._fs, self._path(entry.key), entry, start, stop)
                begun = asyncio.run_coroutine_threadsafe(work, self._fs.loop)
                return await asyncio.wrap_future(begun)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._get, entry, start, stop)
        except Exception as error:  # noqa: BLE001
            raise self._translated(error, entry.key) from None

    async def close(self) -> None:
        """See `Backend.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, entry: Entry, start: int, stop: int) -> bytes:
        fs = getattr(self._own, "fs", None)
        if fs is None:
            fs = self._own.fs = self._open()
        path = self._path(entry.key)
        data: bytes = fs.cat_file(path, start, stop)
        # After the read: what was written before or during it shows now.
        _check(entry, fs.info(path))
        return data

    def _path(self, key: str) -> str:
        """Return the file system's own path of a key; of a signed address with its signature."""
        signed = self._location.asked and key == self._location.pattern
        return self._root + (self._location.asked if signed else key)

    def _walked(self, location: Location, after: str | None) -> Iterator[Page]:
        page: list[Mapping[str, Any]] = []
        top = _folder(self._root + location.prefix) or self._fs.root_marker
        self._fs.invalidate_cache()
        last = None if after is None else self._root + after
        for info in walk(self._fs, top, location.depth, last):
            if location.scheme in WEB and "?" in info["name"]:
                continue  # what sorts the page by another column, as Apache's have it
            if location.scheme in WEB and not location.matches(self._key(info)):
                continue  # each of its files has to be asked for its size
            page.append(info)
            if len(page) == PAGE:
                yield self._sized(page)
                page = []
        yield self._sized(page)

    def _sized(self, page: list[Mapping[str, Any]]) -> Page:
        """Return the entries; a web server's listing lacks sizes, so each file is asked."""
        if any(info["size"] is None for info in page):
            asked = list(self._threads.map(self._info_of_link, page))
            page = [info for info in asked if info is not None]
            if dead := len(asked) - len(page):
                logger.warning("%d links of %s lead nowhere", dead, self._location.url)
        return Page(_entry(self._key(info), info) for info in page)

    def _key(self, info: Mapping[str, Any]) -> str:
        return str(info["name"]).removeprefix(self._root)

    def _info_of_link(self, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what a link of a web page leads to; None where there is nothing."""
        try:
            found: Mapping[str, Any] = self._fs.info(info["name"])
        except Exception as error:
            if _may_be_an_answer(error) and _answer(error).status in (404, 410):
                return None
            raise
        return found

    def _translated(self, error: Exception, key: str) -> Exception:
        if isinstance(error, StoreError):
            return error
        if not _may_be_an_answer(error):
            where = f"{self._location.root}{key}"
            if isinstance(error, ValueError) and key:  # a key that the client cannot name
                return StoreError(f"{where}: {type(error).__name__}: {error}")
            if isinstance(error, TypeError | ValueError | KeyError) and not key:
                return ConfigError(
                    f"source {where.rstrip('/')}: its storage_options were refused "
                    f"({type(error).__name__}: {error})"
                )
            return error  # a bug
        explained = explain(_answer(error), self._location.root, key, self._option)
        return _behind_a_redirect(error, explained, self._location.root)


def _behind_a_redirect(error: Exception, explained: StoreError, root: str) -> StoreError:
    """Return the error, which names the server if it was another one that refused."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
    asked = getattr(getattr(cause, "request_info", None), "url", None)
    if not isinstance(explained, AccessError) or asked is None:
        return explained
    if origin_of(str(asked)) == origin_of(root):
        return explained
    server = "{}://{}:{}".format(*origin_of(str(asked)))
    made = type(explained)(
        f"{explained}; {server} refused, to which {root} redirects: headers, cookies and "
        "passwords go to the server of source.url only, so name the other one there if it shall "
        "have them"
    )
    made.exit_code = explained.exit_code
    return made


def walk(
    fs: Any, top: str, depth: int | None, after: str | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield fsspec's entries of the files below a folder, in the order of their names.

    fsspec's own walk leaves out, without a word, each sub-folder that it fails to list. Here
    a failure is the listing's, which then goes on behind the last name that was told.

    Args:
        fs: the file system.
        top: the folder.
        depth: levels below it; None: all.
        after: names up to this one, and folders that hold no others, are left out.

    Raises:
        Exception: whatever the file system raises; but a sub-folder that has gone is empty,
            and one that may not be listed is left out with a warning, as local ones are.
    """
    yield from _below(fs, fs.ls(top, detail=True), top, depth, after, lambda: fs.ls(top, True))


def _below(
    fs: Any,
    found: list[Mapping[str, Any]],
    folder: str,
    depth: int | None,
    after: str | None,
    ask_top: Callable[[], object],
) -> Iterator[Mapping[str, Any]]:
    for name, info in sorted(
        ((_name(info), info) for info in found if info["name"]), key=itemgetter(0)
    ):
        is_folder = info["type"] == "directory"
        if name.rstrip("/") == folder.rstrip("/") and is_folder:
            continue  # some stores list a folder among its own content
        if not is_folder:
            if after is None or name > after:
                yield info
        elif (depth is None or depth > 1) and not _is_behind(name, after):
            inside = _listed(fs, _folder(name), ask_top)
            yield from _below(fs, inside, name, depth and depth - 1, after, ask_top)


def _folder(name: str) -> str:
    """Return a folder as it is asked for; on web servers another address is no folder's."""
    return name if name.startswith(("http://", "https://")) else name.rstrip("/")


def _name(info: Mapping[str, Any]) -> str:
    """Return the name by which an entry is sorted, so that keys come in their own order."""
    name = str(info["name"])
    return name.rstrip("/") + "/" if info["type"] == "directory" else name


def _is_behind(folder: str, after: str | None) -> bool:
    return after is not None and folder < after and not after.startswith(folder)


def _listed(fs: Any, folder: str, ask_top: Callable[[], object]) -> list[Mapping[str, Any]]:
    try:
        found: list[Mapping[str, Any]] = fs.ls(folder, detail=True)
    except Exception as error:
        answer = _answer(error) if _may_be_an_answer(error) else None
        if answer is None or answer.status not in (403, 404, 410):
            raise
        # Where everything is refused by now, that says nothing about this folder.
        ask_top()
        if answer.status == 403:
            logger.warning(
                "%s is left out of the listing: it may not be read", short(folder.rstrip("/"))
            )
        return []
    return found


def _answer(error: BaseException) -> Answer:
    """Return what a client's exception says; s3fs keeps botocore's as the cause."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    if isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(response.get("Error", {}).get("Code", ""))
        region = str(response.get("Error", {}).get("Region", ""))
        if code.isdigit():  # answers to HEAD have no body, so no word
            status, code = int(code), ""
        return Answer(type(error).__name__, status, code, region=region)
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            return Answer(type(error).__name__, status)
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause and _may_be_an_answer(cause):
        return _answer(cause)  # fsspec's HTTP calls any failure of HEAD and GET "not found"
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return Answer(type(error).__name__, 404)
    if isinstance(error, PermissionError):
        return Answer(type(error).__name__, 403)
    if (words := credentials_failure(error)) is not None:
        return Answer(type(error).__name__, code=words, cause=NO_CREDENTIALS)
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Answer(type(error).__name__, cause=UNTRUSTED)
    words, address = connection_failure(error)
    return Answer(type(error).__name__, cause=words, address=address)


def _may_be_an_answer(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def _entry(key: str, info: Mapping[str, Any]) -> Entry:
    etag = info.get("ETag") or info.get("etag")
    if info["size"] is None:
        raise StoreError(f"{key}: the store does not tell its size, so it cannot be divided")
    # Of web servers the ETag is enough; where there is none, the time is what there is.
    modified = _modified(info) if etag else _modified(info) or http_seconds(info.get(_HEADER))
    return Entry(key, int(info["size"]), etag and str(etag), modified)


def _modified(info: Mapping[str, Any]) -> float | None:
    for name in _MODIFIED:
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


def _check(entry: Entry, info: Mapping[str, Any]) -> None:
    found = _entry(entry.key, info)
    if (found.size, found.etag, found.mtime) != (entry.size, entry.etag, entry.mtime):
        raise ObjectChangedError(
            f"{entry.key} was rewritten since it was listed: expected {entry.size} bytes of "
            f"{entry.etag or entry.mtime}, found {found.size} of {found.etag or found.mtime}"
        )


async def _plain_get(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    data: bytes = await fs._cat_file(path, start=start, end=stop)
    _check(entry, await fs._info(path))
    return data


async def _s3_get(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """One conditional request; `_cat_file` would ask for the size first, and not for a version."""
    wanted = {"IfMatch": entry.etag} if entry.etag else {}
    if ranged := _is_part(entry, start, stop):
        wanted["Range"] = f"bytes={start}-{stop - 1}"
    bucket = path.partition("/")[0]
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=entry.key, **wanted)
    async with answer["Body"] as body:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        _require_part(entry, ranged, status)
        check_response(entry, (start, stop), response_of(entry, (start, stop), status, headers))
        return await _at_most(body.read, stop - start, entry)


async def _gcs_get(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """As `_plain_get`; `_cat_file` would not look at which range it was given."""
    ranged = _is_part(entry, start, stop)
    headers = {"Range": f"bytes={start}-{stop - 1}"} if ranged else {}
    status, told, _, data = await fs._request("GET", fs.url(path), headers=headers)
    _require_part(entry, ranged, status)
    # Its ETag is not the one of the listing, which another request is compared with.
    response = response_of(entry, (start, stop), status, told)
    check_range(entry, (start, stop), response)
    check_told(entry, response)
    if "content-encoding" in told and len(data) != stop - start:
        raise StoreError(
            f"{entry.key}: expected {stop - start} bytes, found {len(data)}: it is stored with "
            f"Content-Encoding {told['content-encoding']}, which the client unpacks; store it "
            "without"
        )
    _check(entry, await fs._info(path))
    return bytes(data)


async def _azure_get(fs: Any, path: str, entry: Entry, start: int, stop: int) -> bytes:
    """One conditional download; `_cat_file` would ask for no version, and believe any range."""
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
                raw_response_hook=partial(_check_azure, entry),
                **(condition if entry.etag else {}),
                **fs._timeout_kwargs,
            )
            return bytes(await download.readall())
        except (IndexError, ValueError):  # the client itself takes the header apart
            raise BrokenReadError(
                f"{entry.key}: the store sent a part of the object without telling which"
            ) from None


def _check_azure(entry: Entry, answer: Any) -> None:
    """Check one of the responses of which a download consists."""
    response = answer.http_response
    if response.status_code not in (200, 206):
        return
    headers = answer.http_request.headers
    asked = headers.get("x-ms-range") or headers.get("Range") or ""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    wanted = (int(first or 0), min(int(last) + 1 if last else entry.size, entry.size))
    _require_part(entry, bool(asked), response.status_code)
    check_response(
        entry, wanted, response_of(entry, wanted, response.status_code, response.headers)
    )


def _is_part(entry: Entry, start: int, stop: int) -> bool:
    return start > 0 or stop < entry.size


def _require_part(entry: Entry, ranged: bool, status: int) -> None:
    if ranged and status != 206:
        raise BrokenReadError(
            f"{entry.key}: expected a part of the object (206), the store answered {status}"
        )


async def _at_most(read: Callable[[int], Awaitable[bytes]], most: int, entry: Entry) -> bytes:
    """Return what is read to the end; a server that sends more than was asked for is left.

    Raises:
        BrokenReadError: it does.
    """
    pieces, found = [], 0
    while piece := await read(min(most + 1 - found, _PIECE_BYTES)):
        pieces.append(piece)
        if (found := found + len(piece)) > most:
            raise BrokenReadError(f"{entry.key}: expected {most} bytes, the store sends more")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _web_get(
    support: RangeSupport, fs: Any, address: str, entry: Entry, start: int, stop: int
) -> bytes:
    """One request, whose answer says which version it is."""
    settings = dict(fs.kwargs)
    # Packed, a range would be one of other bytes, and its size whatever the server makes it.
    headers = {"Accept-Encoding": "identity", **settings.pop("headers", {})}
    if ranged := _is_part(entry, start, stop):
        headers["Range"] = f"bytes={start}-{stop - 1}"
    if entry.etag and not entry.etag.startswith("W/"):
        headers["If-Match"] = entry.etag
    session = await fs.set_session()
    async with session.get(fs.encode_url(address), headers=headers, **settings) as answer:
        answer.raise_for_status()
        is_whole = answer.status != 206
        wanted = (0, entry.size) if is_whole else (start, stop)
        told = response_of(entry, wanted, answer.status, answer.headers)
        check_response(entry, wanted, told)
        if ranged:
            support.take_in(whole=is_whole)
        data = await _at_most(answer.content.read, wanted[1] - wanted[0], entry)
    check_length(entry, wanted, len(data))
    return data[start:stop] if is_whole else data


_GETTERS: Mapping[str, Getter] = {
    **dict.fromkeys(("s3", "s3a"), _s3_get),
    **dict.fromkeys(("gs", "gcs"), _gcs_get),
    **dict.fromkeys(("az", "abfs", "abfss"), _azure_get),
}


def _getter(location: Location) -> Getter:
    """Return how a range of an object is read."""
    if location.scheme in WEB:
        return partial(_web_get, RangeSupport(location.root))
    return _GETTERS.get(location.scheme, _plain_get)


def _s3_pages(fs: Any, bucket: str, prefix: str, after: str | None) -> Iterator[Page]:
    """Yield pages as they come; `find` would hold them all back until the last."""
    more = {"StartAfter": after} if after else {}
    fs.connect()  # by itself, because what options it refuses is no fault of the listing
    while True:
        answer = _s3_page(fs, bucket, Prefix=prefix, **more)
        last = not answer.get("IsTruncated")
        yield Page(_s3_entries(bucket, answer.get("Contents", ())), last=last)
        if last:
            return
        token = answer.get("NextContinuationToken")
        if not token or token == more.get("ContinuationToken"):
            raise StoreError(
                f"s3://{bucket}: the listing does not tell where its next page begins, so it "
                "cannot be listed to its end"
            )
        more = {"ContinuationToken": token}


def _s3_page(fs: Any, bucket: str, **asked: str) -> Mapping[str, Any]:
    try:
        answer: Mapping[str, Any] = fs.call_s3("list_objects_v2", Bucket=bucket, **asked)
    except (KeyError, TypeError, ValueError) as error:  # as the library takes it apart
        raise StoreError(
            f"s3://{bucket}: its listing cannot be read ({type(error).__name__}: {error})"
        ) from None
    if not _SIGNS_OF_A_LISTING & answer.keys():
        raise TransientStoreError(
            f"s3://{bucket}: its answer is no listing, but something else"
        )
    return answer


# What every S3 has at least one of, for an empty listing too.
_SIGNS_OF_A_LISTING = frozenset({"IsTruncated", "KeyCount", "Name", "Contents"})


def _s3_entries(bucket: str, rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Return the entries of a page, but for markers of folders.

    Raises:
        StoreError: an entry lacks what each has.
    """
    try:
        return [
            Entry(row["Key"], row["Size"], row.get("ETag"), row["LastModified"].timestamp())
            for row in rows
            if row["Size"] or not row["Key"].endswith("/")
        ]
    except KeyError as error:
        raise StoreError(
            f"s3://{bucket}: an entry of the listing lacks {error.args[0]}, so it cannot be used"
        ) from None


_EXTRAS = {
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
) -> tuple[Location, FsspecBackend]:
    """Return the backend of a URL, and the location in that file system's own paths.

    Raises:
        ConfigError: fsspec knows no such scheme, misses its package, or refuses an option.
    """
    options = dict(source.storage_options)
    if location.scheme in _S3:
        options = _one_attempt(options, concurrency, timeout_seconds)
    elif location.scheme in WEB:
        try:
            from aiohttp import ClientTimeout
        except ImportError:
            raise ConfigError(
                f"source.url {location.url}: index pages, globs and options of web servers need "
                "aiohttp: pip install 'growcache[http]'"
            ) from None
        stalled = stalled_seconds(timeout_seconds)
        options.setdefault("timeout", ClientTimeout(None, sock_connect=5, sock_read=stalled))
    options = with_own_sessions(url, options)

    def opened() -> Any:
        fs = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)[0]
        if location.scheme in _S3:
            fs.retries = 1
        return fs

    try:
        fs, path = url_to_fs(url, **options)
        folder = "/" if url.endswith("/") and not path.endswith("/") else ""
        if location.scheme in BUCKETS:
            root = f"{location.scheme}://{location.userinfo}{location.bucket}/"
            root = root if location.scheme in WEB else f"{location.bucket}/"
        else:
            root = ""
            if public_url(path) != path:  # keys are kept, in shards and index
                raise ConfigError(
                    f"source.url {location.url}: credentials in an address behind :: would "
                    "become part of keys; put them into source.storage_options"
                )
            location = replace(location, pattern=path + folder)
        del fs
        option = server_option(location.scheme, source.storage_options)
        return location, FsspecBackend(opened, location, root, concurrency, option)
    except (ImportError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, KeyError):
            error = ValueError(f"storage_options lack {error}")
        if isinstance(error, ValueError) and "@" in url:
            # urllib quotes what it takes for a port: a piece of the password.
            error = ValueError("its user and password have to be percent-encoded")
        if isinstance(error, ImportError) and (extra := _EXTRAS.get(location.scheme)):
            error = ImportError(f"{error}: pip install 'growcache[{extra}]'")
        known = "" if location.scheme in fsspec.available_protocols() else "; see fsspec's docs"
        raise ConfigError(f"source.url {location.url}: {error}{known}") from None


def _one_attempt(
    options: dict[str, Any], concurrency: int, timeout_seconds: float
) -> dict[str, Any]:
    """Leave retries to growcache, and have a connection for every read in flight."""
    stalled = stalled_seconds(timeout_seconds)
    config = {
        "read_timeout": stalled,
        "connect_timeout": min(stalled, 5),
        "retries": {"max_attempts": 0},
        "max_pool_connections": max(10, concurrency),
        **options.get("config_kwargs", {}),
    }
    return {**options, "config_kwargs": config}
