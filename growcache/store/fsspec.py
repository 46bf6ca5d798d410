"""Every other URL, and every option that obstore does not know, through fsspec."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from growcache.config import SourceConfig
from growcache.errors import AccessError, ConfigError, ObjectMissingError, StoreError
from growcache.secrecy import url_without_secrets
from growcache.store.contract import PAGE_ENTRIES, Entry, Page
from growcache.store.credentials import server_option
from growcache.store.fsspec_requests import (
    check_same_info,
    entry_of_info,
    get_plain,
    range_getter,
    s3_pages,
    server_address,
    with_guarded_sessions,
)
from growcache.store.listing import folder_path, walk_folders
from growcache.store.retries import stalled_seconds
from growcache.store.store_errors import is_client_error, read_fsspec_error, store_error
from growcache.store.urls import BUCKET_SCHEMES, S3_SCHEMES, WEB_SCHEMES, Location

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logging.getLogger(__name__)


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
        self.identity = location.root + location.signed_key if root else str(hash(self._fs))
        self.sorted = location.scheme in S3_SCHEMES and not root.endswith("--x-s3/")
        self._is_async = isinstance(self._fs, AsyncFileSystem) and self._fs.async_impl
        # Some clients are not meant for several threads: one for each.
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(min(8, concurrency), "growcache-fsspec")
        self._get_async = range_getter(location) if self._is_async else get_plain

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        try:
            if location.scheme in S3_SCHEMES:
                yield from s3_pages(self._fs, self._root.rstrip("/"), location.prefix, after)
            else:
                yield from self._walked(location, after)
        except Exception as error:  # noqa: BLE001 - clients of any make; see _translated
            raise self._translated(error, "") from None

    def head(self, key: str) -> Entry:
        try:
            info = self._fs.info(self._path(key))
        except Exception as error:  # noqa: BLE001
            raise self._translated(error, key) from None
        if info["type"] == "directory":
            raise ObjectMissingError(
                f"{self._location.root}{key} is a folder; to take what is below it, end "
                "source.url with /"
            )
        return entry_of_info(key, info)

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
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
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, entry: Entry, start: int, stop: int) -> bytes:
        fs = getattr(self._own, "fs", None)
        if fs is None:
            fs = self._own.fs = self._open()
        path = self._path(entry.key)
        data: bytes = fs.cat_file(path, start, stop)
        # After the read: what was written before or during it shows now.
        check_same_info(entry, fs.info(path))
        return data

    def _path(self, key: str) -> str:
        """Return the file system's own path of a key; of a signed address with its signature."""
        signed = self._location.signed_key and key == self._location.pattern
        return self._root + (self._location.signed_key if signed else key)

    def _walked(self, location: Location, after: str | None) -> Iterator[Page]:
        page: list[Mapping[str, Any]] = []
        top = folder_path(self._root + location.prefix) or self._fs.root_marker
        self._fs.invalidate_cache()
        last = None if after is None else self._root + after
        for info in walk_folders(self._fs, top, location.depth, last):
            if location.scheme in WEB_SCHEMES and "?" in info["name"]:
                continue  # what sorts the page by another column, as Apache's have it
            if location.scheme in WEB_SCHEMES and not location.matches(self._key(info)):
                continue  # each of its files has to be asked for its size
            page.append(info)
            if len(page) == PAGE_ENTRIES:
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
        return Page(entry_of_info(self._key(info), info) for info in page)

    def _key(self, info: Mapping[str, Any]) -> str:
        return str(info["name"]).removeprefix(self._root)

    def _info_of_link(self, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what a link of a web page leads to; None where there is nothing."""
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
            where = f"{self._location.root}{key}"
            if isinstance(error, ValueError) and key:  # a key that the client cannot name
                return StoreError(f"{where}: {type(error).__name__}: {error}")
            if isinstance(error, TypeError | ValueError | KeyError) and not key:
                return ConfigError(
                    f"source {where.rstrip('/')}: its storage_options were refused "
                    f"({type(error).__name__}: {error})"
                )
            return error  # a bug
        explained = store_error(
            read_fsspec_error(error), self._location.root, key, self._option
        )
        return _name_redirected_server(error, explained, self._location.root)


def _name_redirected_server(error: Exception, explained: StoreError, root: str) -> StoreError:
    """Return the error, which names the server if it was another one that refused."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
    asked = getattr(getattr(cause, "request_info", None), "url", None)
    if not isinstance(explained, AccessError) or asked is None:
        return explained
    if server_address(str(asked)) == server_address(root):
        return explained
    server = "{}://{}:{}".format(*server_address(str(asked)))
    made = type(explained)(
        f"{explained}; {server} refused, to which {root} redirects: headers, cookies and "
        "passwords go to the server of source.url only, so name the other one there if it shall "
        "have them"
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
) -> tuple[Location, FsspecBackend]:
    """Return the backend of a URL, and the location in that file system's own paths.

    Raises:
        ConfigError: fsspec knows no such scheme, misses its package, or refuses an option.
    """
    options = dict(source.storage_options)
    if location.scheme in S3_SCHEMES:
        options = _s3_options(options, concurrency, timeout_seconds)
    elif location.scheme in WEB_SCHEMES:
        try:
            from aiohttp import ClientTimeout
        except ImportError:
            raise ConfigError(
                f"source.url {location.url}: index pages, globs and options of web servers need "
                "aiohttp: pip install 'growcache[http]'"
            ) from None
        stalled = stalled_seconds(timeout_seconds)
        options.setdefault("timeout", ClientTimeout(None, sock_connect=5, sock_read=stalled))
    options = with_guarded_sessions(url, options)

    def opened() -> Any:
        fs = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)[0]
        if location.scheme in S3_SCHEMES:
            fs.retries = 1
        return fs

    try:
        fs, path = url_to_fs(url, **options)
        folder = "/" if url.endswith("/") and not path.endswith("/") else ""
        if location.scheme in BUCKET_SCHEMES:
            root = f"{location.scheme}://{location.userinfo}{location.bucket}/"
            root = root if location.scheme in WEB_SCHEMES else f"{location.bucket}/"
        else:
            root = ""
            if url_without_secrets(path) != path:  # keys are kept, in shards and index
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
        if isinstance(error, ImportError) and (extra := _EXTRA_OF_SCHEME.get(location.scheme)):
            error = ImportError(f"{error}: pip install 'growcache[{extra}]'")
        known = "" if location.scheme in fsspec.available_protocols() else "; see fsspec's docs"
        raise ConfigError(f"source.url {location.url}: {error}{known}") from None


def _s3_options(
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
