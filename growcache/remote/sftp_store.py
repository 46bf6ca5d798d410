"""Files of SSH servers: connections that break and are made anew."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import TYPE_CHECKING, Any, TypeVar

from growcache.config import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.remote.fsspec_store import walk
from growcache.remote.retry import stalled_seconds
from growcache.remote.ssh import Connection, SshServer, ssh_server, words
from growcache.remote.store import PAGE, Entry, Page
from growcache.remote.urls import Location

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_MOST = 8  # connections that are kept
_PIECE_BYTES = 1 << 15  # what every server answers at once; many are asked for together
_TOGETHER_BYTES = 1 << 25  # whose requests fit into any window, so that asking never waits


class SftpBackend:
    """One user on one host; keys are absolute paths there.

    A connection is lent to one request at a time, and made where none is idle. One on which
    anything failed is given up, for nobody knows what of it is still on its way.
    """

    sorted = False  # by folder

    def __init__(self, server: SshServer, most: int) -> None:
        self._server = server
        self.identity = server.identity
        self._idle: list[Connection] = []
        weakref.finalize(self, _close_all, self._idle)  # paramiko itself would keep them
        self._threads = ThreadPoolExecutor(min(_MOST, most), "growcache-sftp")

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        """See `Backend.listing`; sorted within each folder."""
        top = location.prefix.rstrip("/") or "/"
        page = Page()
        for info in self._lines(walk(_Followed(self), top, location.depth, after), top):
            page.append(_entry(info["name"], info))
            if len(page) == PAGE:
                yield page
                page = Page()
        yield page

    def _lines(
        self, found: Iterator[Mapping[str, Any]], top: str
    ) -> Iterator[Mapping[str, Any]]:
        try:
            yield from found
        except Exception as error:
            if (translated := self._translated(error, top)) is None:
                raise
            if isinstance(translated, ObjectMissingError):
                translated.exit_code = 2  # the folder of the URL itself
            raise translated from None

    def head(self, key: str) -> Entry:
        """See `Backend.head`."""
        info = self._asked(lambda sftp: _info(key, sftp.stat(key)), key)
        if info["type"] != "file":
            raise ObjectMissingError(
                f"{self._where(key)} is not a file; to take all files below a folder, end "
                "source.url with /"
            )
        return _entry(key, info)

    async def get(self, entry: Entry, start: int, stop: int) -> Buffer:
        """See `Backend.get`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads,
            lambda: self._asked(lambda sftp: _read(sftp, entry, start, stop), entry.key),
        )

    async def close(self) -> None:
        """See `Backend.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        _close_all(self._idle)

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """Lend a connection.

        Raises:
            StoreError: there can be none; see `SshServer.connect`.
            ConfigError: for what `SshServer.connect` says.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._server.connect()
        is_sound = False
        try:
            yield connection.sftp
            is_sound = True
        except (FileNotFoundError, PermissionError, StoreError):  # answers, as good as others
            is_sound = True
            raise
        finally:
            if is_sound and len(self._idle) < _MOST:
                self._idle.append(connection)
            else:
                connection.close()
            if not is_sound:
                _close_all(self._idle)  # the same may have befallen them

    def _asked(self, ask: Callable[[Any], T], key: str) -> T:
        try:
            with self.lent() as sftp:
                return ask(sftp)
        except Exception as error:
            if (translated := self._translated(error, key)) is None:
                raise
            raise translated from None

    def _translated(self, error: Exception, key: str) -> Exception | None:
        """Return growcache's error; None where it is a bug."""
        if isinstance(error, StoreError | ConfigError):
            return error
        if isinstance(error, FileNotFoundError):
            return ObjectMissingError(f"{self._where(key)} does not exist")
        if isinstance(error, PermissionError):
            return AccessError(f"{self._where(key)} may not be read by this user")
        # What is neither the system's nor of the language itself is paramiko's own.
        if isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins":
            return TransientStoreError(f"{self._where(key)}: no answer ({words(error)})")
        return None

    def _where(self, key: str) -> str:
        return f"{self._server.url}{key}"


class _Followed:
    """Folders as `walk` wants them, with links as what they point to."""

    def __init__(self, backend: SftpBackend) -> None:
        self._backend = backend

    def ls(self, folder: str, detail: bool) -> list[Mapping[str, Any]]:
        base = folder.rstrip("/")
        with self._backend.lent() as sftp:
            # All of them first: the answers to other requests are in between otherwise.
            listed = [_info(f"{base}/{one.filename}", one) for one in sftp.listdir_iter(folder)]
            found = [_followed(sftp, info) for info in listed]
        return [info for info in found if info["type"] in ("file", "directory")]


def _close_all(idle: list[Connection]) -> None:
    while idle:
        idle.pop().close()


def _info(name: str, found: Any) -> dict[str, Any]:
    """Return an entry as fsspec's file systems have them."""
    mode = found.st_mode
    kind = "file" if mode is None or S_ISREG(mode) else "other"
    if mode is not None and (S_ISDIR(mode) or S_ISLNK(mode)):
        kind = "directory" if S_ISDIR(mode) else "link"
    return {"name": name, "type": kind, "size": found.st_size, "mtime": found.st_mtime}


def _followed(sftp: Any, info: dict[str, Any]) -> dict[str, Any]:
    """Return what a link points to; itself where nothing is there, or a folder it lies in."""
    name = info["name"]
    if info["type"] != "link":
        return info
    try:
        found = _info(name, sftp.stat(name))
    except (FileNotFoundError, PermissionError):
        return info
    if found["type"] != "directory":
        return found
    real = sftp.normalize(name)
    above = any(sftp.normalize(str(folder)) == real for folder in PurePosixPath(name).parents)
    return info if above else found


def _entry(key: str, info: Mapping[str, Any]) -> Entry:
    if info["size"] is None:
        raise StoreError(f"{key}: the server does not tell its size, so it cannot be divided")
    mtime = info["mtime"]
    return Entry(key, int(info["size"]), None, None if mtime is None else float(mtime))


def _read(sftp: Any, entry: Entry, start: int, stop: int) -> bytes:
    with sftp.open(entry.key, "rb") as file:
        data = b"".join(_pieces(file, start, stop))
        # After the read: what was written before or during it shows now.
        found = _entry(entry.key, _info(entry.key, file.stat()))
    if (found.size, found.mtime) != (entry.size, entry.mtime):
        raise ObjectChangedError(
            f"{entry.key} was rewritten since it was listed: expected {entry.size} bytes of "
            f"time {entry.mtime}, found {found.size} of {found.mtime}"
        )
    return data


def _pieces(file: Any, start: int, stop: int) -> Iterator[bytes]:
    for first in range(start, stop, _TOGETHER_BYTES):
        last = min(first + _TOGETHER_BYTES, stop)
        wanted = [(at, min(_PIECE_BYTES, last - at)) for at in range(first, last, _PIECE_BYTES)]
        yield from file.readv(wanted)


def open_sftp(
    location: Location, url: str, source: SourceConfig, concurrency: int, timeout_seconds: float
) -> SftpBackend:
    """Return the backend of a URL's host.

    Raises:
        ConfigError: paramiko is missing, the URL names no host, or an option is unknown.
    """
    stalled = stalled_seconds(timeout_seconds)
    server = ssh_server(url, location, source.storage_options, stalled)
    return SftpBackend(server, concurrency)
