"""A folder of small files that several machines read and write, in a bucket or on a shared disk.

Writes are atomic in S3, GCS, Azure and on local disks. Elsewhere they are as atomic as fsspec's
client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import obstore
from obstore.exceptions import AlreadyExistsError, NotSupportedError
from obstore.store import LocalStore

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectMissingError,
    StoreError,
)
from growcache.store.adlfs_options import AZURE_SCHEMES, adlfs_options
from growcache.store.credentials import server_option
from growcache.store.obstore import OBSTORE_ERRORS, open_client
from growcache.store.request_counts import PROCESS_REQUESTS
from growcache.store.store_errors import (
    is_client_error,
    read_fsspec_error,
    read_obstore_error,
    store_error,
)
from growcache.store.urls import LOCAL_SCHEMES, SSH_SCHEMES, Location, parse_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class SharedFolder(Protocol):
    url: str  # without secrets
    atomic: bool  # whether readers never see a half-written file

    def read(self, name: str, most: int) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        Raises:
            StoreError: The file cannot be read, or has more than ``most`` bytes.
        """

    def write(self, name: str, data: bytes, *, only_new: bool = False) -> bool:
        """Write a file, and return whether it was written.

        With ``only_new``, an existing file is kept and False is returned. Some stores cannot
        tell that it exists.
        """


class _ObstoreFolder:
    atomic = True

    def __init__(
        self, store: ObjectStore, url: str, root: str, prefix: str, option: str
    ) -> None:
        self.url = url
        self._store, self._root, self._prefix, self._option = store, root, prefix, option

    def read(self, name: str, most: int) -> bytes | None:
        def read() -> bytes:
            with self._naming(name):
                answer = obstore.get(self._store, self._prefix + name)
                _refuse_large(name, answer.meta["size"], most)
                return bytes(answer.bytes())

        return _read_or_none(read)

    def write(self, name: str, data: bytes, *, only_new: bool = False) -> bool:
        path = self._prefix + name

        def create() -> bool:
            with self._naming(name, writes=True):
                try:
                    obstore.put(self._store, path, data, mode="create", use_multipart=False)
                except AlreadyExistsError:
                    return False
                return True

        def replace() -> bool:
            with self._naming(name, writes=True):
                obstore.put(self._store, path, data)
            return True

        if only_new:
            with suppress(NotSupportedError):
                return PROCESS_REQUESTS.counted_write(create)
        return PROCESS_REQUESTS.counted_write(replace)

    @contextmanager
    def _naming(self, name: str, *, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except (NotSupportedError, StoreError):
            raise
        except OBSTORE_ERRORS as error:
            answer = read_obstore_error(error)
            found = store_error(answer, self._root, self._prefix + name, self._option)
            raise _of_a_write(found, self.url) if writes else found from None


class _FsspecFolder:
    atomic = False

    def __init__(self, fs: Any, path: str, location: Location) -> None:
        self.url = location.url
        self._fs, self._path = fs, path.rstrip("/") + "/"

    def read(self, name: str, most: int) -> bytes | None:
        path = self._path + name

        def read() -> bytes:
            with self._naming(name):
                _refuse_large(name, self._fs.size(path) or 0, most)
                return bytes(self._fs.cat_file(path))

        return _read_or_none(read)

    def write(self, name: str, data: bytes, *, only_new: bool = False) -> bool:
        path = self._path + name

        def write() -> bool:
            with self._naming(name, writes=True):
                self._fs.invalidate_cache()
                if only_new and self._fs.exists(path):
                    return False
                self._fs.makedirs(self._path, exist_ok=True)
                self._fs.pipe_file(path, data)
            return True

        return PROCESS_REQUESTS.counted_write(write)

    @contextmanager
    def _naming(self, name: str, *, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError:
            raise ObjectMissingError(f"{self.url}{name} does not exist") from None
        except Exception as error:
            if not is_client_error(error):
                raise
            found = store_error(read_fsspec_error(error), self.url, name)
            raise _of_a_write(found, self.url) if writes else found from None


def _of_a_write(error: StoreError, url: str) -> StoreError:
    if isinstance(error, AccessError) and not isinstance(error, CredentialsError):
        return AccessError(f"these credentials may not write into {url}")
    return error


def _read_or_none(read: Callable[[], bytes]) -> bytes | None:
    try:
        return PROCESS_REQUESTS.counted_read(read)
    except ObjectMissingError:
        return None


def _refuse_large(name: str, size: int, most: int) -> None:
    if size > most:
        raise StoreError(f"{name}: expected at most {most:,} bytes, found {size:,}")


def open_shared_folder(url: str, source: SourceConfig, timeout_seconds: float) -> SharedFolder:
    """Open a folder with the client and ``storage_options`` of a source, without a request yet."""
    location = parse_url(url.rstrip("/") + "/")
    if location.scheme in LOCAL_SCHEMES:
        # Rooted at /, because the first write creates a missing folder.
        return _ObstoreFolder(LocalStore(), location.url, "/", location.pattern[1:], "")
    if source.client != "fsspec" and location.scheme not in SSH_SCHEMES:
        client = open_client(location, source, timeout_seconds)
        if client is not None:
            option = server_option(location.scheme, source.storage_options)
            return _ObstoreFolder(client, location.url, location.root, location.pattern, option)
    return _open_fsspec(url, source, location)


def _open_fsspec(url: str, source: SourceConfig, location: Location) -> SharedFolder:
    from fsspec.core import url_to_fs

    options = source.storage_options
    if location.scheme in AZURE_SCHEMES:
        options = adlfs_options(location, options)
    try:
        fs, path = url_to_fs(url, use_listings_cache=False, **options)
    except (ImportError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{location.url}: {error}", code="GC219") from None
    return _FsspecFolder(fs, path, location)
